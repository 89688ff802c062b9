"""Run on two tensor-parallel ranks: every dropout mask that is drawn, seen where torch draws it.

    words        [T, width]         one mask on all ranks
    ViT, LLM     [rows, 1, width]   one mask on all ranks; under sequence parallelism each rank its own
    attention    [b, heads, s, s]   each rank its own: it has other heads

Prints for every way of running the share of masks that are not as they should be, and whether drop path is; 0 is right.
"""

import sys
from argparse import Namespace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.vlm.pipeline.stage import Stage
from omnibal_ext.chain import RECOMPUTABLE_KINDS
from tests.distributed import harness

TELLING = 64
"""Numbers in a mask that will not come up twice by chance."""
WAYS = ("none", "full", "cheap")


class Masks(TorchDispatchMode):
    """Records what is drawn inside: forward, backward and recomputation run in one thread on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.bernoulli_.float:
            self.drawn.append(result.bool().clone())
        return result


def main() -> None:
    del sys.argv[1:]
    args = harness.start(harness.SMALL, 2, 1, ["--hidden-dropout", "0.3", "--attention-dropout", "0.3"])
    wrong: dict[str, float] = {}
    for share, way in product((False, True), WAYS):
        wrong |= {f"{'shared' if share else 'whole'} {way}: {what}": n for what, n in run(args, share, way).items()}
    harness.report(wrong | {"drop path": drop_path(args)})
    torch.distributed.destroy_process_group()


def run(args: Namespace, sequence_parallel: bool, way: str) -> dict[str, float]:
    """Share of wrong masks in one training pass of a stage, and how many an evaluation draws."""
    args.sequence_parallel = sequence_parallel
    chain = harness.build_chain(args, harness.SMALL)
    layers = tuple(layer for layer, kind in enumerate(chain.kinds) if kind in RECOMPUTABLE_KINDS)
    full, cheap = (layers if way == one else () for one in ("full", "cheap"))
    stage = Stage(chain, 0, len(chain.kinds), full, cheap)
    pack = harness.sample_packs(multiple=2)[7]
    with Masks() as forward:
        loss = stage(pack).mean()
    with Masks() as backward:
        loss.backward()
    with Masks() as evaluation, torch.no_grad():
        stage.eval()(pack)
    kept = {"none": 4, "full": 2, "cheap": 4}[way]  # masks of no more dimensions are not drawn again
    again = [mask for mask in forward.drawn if mask.dim() > kept]
    return {
        "between ranks": between_ranks(forward.drawn, sequence_parallel),
        "recomputed": 0.0 if counts(again) == counts(backward.drawn) else 1.0,
        "alike on one rank": max(counts([mask for mask in forward.drawn if mask.numel() >= TELLING]).values()) - 1,
        "in evaluation": float(len(evaluation.drawn)),
        "not drawn": abs(len(forward.drawn) - expected_count(pack.lengths)),
    }


def drop_path(args: Namespace) -> float:
    """How far the losses with and without sequence parallelism are apart: a tile's rows go one way on all ranks."""
    args.hidden_dropout = args.attention_dropout = 0.0
    losses = []
    for args.sequence_parallel in (False, True):
        chain = harness.build_chain(args, harness.DROPPING)
        stage = Stage(chain, 0, len(chain.kinds))
        torch.manual_seed(1)
        losses.append(stage(harness.sample_packs(multiple=2)[7]))
    return float((losses[0] - losses[1]).abs().max() > 1e-5)


def expected_count(lengths: tuple[int, ...]) -> int:
    """The words' mask, and of every layer two hidden ones and one a tile batch or a sample."""
    vision, language = harness.SMALL.vision.layers, harness.SMALL.language.layers
    return 1 + vision * (2 + 1) + language * (2 + len(lengths))


def counts(masks: list[Tensor]) -> dict[str, int]:
    names = [f"{list(mask.shape)} {mask.flatten().tolist()}" for mask in masks]
    return {name: names.count(name) for name in names}


def between_ranks(drawn: list[Tensor], sequence_parallel: bool) -> float:
    """Share of masks that are alike on both ranks and should not be, or the other way round."""
    everyone: list[list[Tensor]] = [[], []]
    torch.distributed.all_gather_object(everyone, drawn)
    wrong = 0
    for mine, other in zip(*everyone, strict=True):
        own = mine.dim() == 4 or (sequence_parallel and mine.dim() == 3)
        wrong += torch.equal(mine, other) == own and (mine.numel() >= TELLING or not own)
    return wrong / len(drawn)


if __name__ == "__main__":
    main()
