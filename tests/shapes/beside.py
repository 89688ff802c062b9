"""Run as a program: what a GPU is asked for by whole iterations with the tower beside the pipeline, and how many bytes.

beside.py engine|local PRESET TENSOR_PARALLEL PIPELINE_PARALLEL TILES TOKENS...

As `iteration`, for a tower of which all is kept from E to V, one whose layers V recomputes, and a frozen one, ahead.
Prints for each preset, way and rank what waits for the device within an iteration; bytes of copies and sums; of every
part that the rank encodes its tiles, and the bytes that are kept from E to V, that V holds on top, and of what is made.
"""

import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # not as `tests`, which imports Megatron
from shapes.iteration import MICROBATCHES, Optimizer, every_rank, packs_of, started, trainer_of, wrapped
from shapes.program import padded_chain

WAYS = ("kept", "recomputed", "frozen")


def iteration(name: str, ranks: tuple[int, int], rank: int, sizes: tuple[int, int], way: str) -> dict[str, Any]:
    """The second iteration of a rank: in the first, kernels, channels and copies are made."""
    from languages import with_layers
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.utils import get_model_config
    from shapes.counter import Count

    from omnibal_ext.architectures.presets import preset

    args, (tensor, _), model = started(name, ranks, rank), ranks, preset(name)
    few = replace(model, vision=replace(model.vision, layers=2, feature_layers=()),
                  language=with_layers(model.language, 2))  # fmt: skip
    frozen = ("vit", "projector") if way == "frozen" else ()
    chain = replace(padded_chain(args, few), frozen=frozen)
    plan = plan_of(few, ranks, frozen, (1, 2) if way == "recomputed" else ())
    module = wrapped(args, chain, plan)
    get_model_config(module).finalize_model_grads_func = finalize_model_grads
    trainer, optimizer, packs = trainer_of(args, few, plan), Optimizer(), packs_of(few, *sizes)
    parts = [part_of(plan, pack, number, tensor) for number, pack in enumerate(packs)]
    # A tower that runs ahead has the first iteration's parts to encode, and then those of the next.
    following = iter([[*parts, *parts] if frozen else parts, parts])
    trainer.packs[True] = SimpleNamespace(begin=lambda *_: images_of(next(following)))
    trainer.bad_steps.watch(optimizer, trainer.end_training_iteration)
    run = partial(trainer.forward_backward, model=[module], num_microbatches=MICROBATCHES)
    args.curr_iteration = 0
    run(data_iterator=[iter(packs)])
    weighed = Weighed(trainer.executor.encoding.tower)
    with Count() as counted:
        run(data_iterator=[iter(packs)])
        optimizer.prepare_grads()
    pieces = weighed.tower.pieces
    copies = sum(p.weights.nbytes + (0 if p.sums is None else p.sums.nbytes) for p in pieces)
    return {"waits": counted.waits, "copies": copies, "parts": weighed.parts}


class Weighed:
    """The tower, with what each run of it leaves to autograd, and what it makes."""

    def __init__(self, tower: Any) -> None:
        self.tower, self.parts, self.encode = tower, list[dict[str, int]](), tower.encode
        tower.encode = self.watched

    def watched(self, part: Any, training: bool, keeps: bool) -> Any:
        from megatron.vlm.profiling.kept import KeptBytes

        with KeptBytes(self.tower.copies.parameters()) as kept:
            made = self.encode(part, training, keeps)
        self.parts.append(
            {"tiles": part.media_of("tiles").amount, "kept": kept.bytes, "made": made.nbytes, "keeps": keeps}
        )
        return made


def plan_of(model: Any, ranks: tuple[int, int], frozen: tuple[str, ...], recompute: tuple[int, ...]) -> Any:
    """Owners in turn, every pack on all ranks, E and V in time."""
    from omnibal_ext.plan import Plan, StagePlan
    from omnibal_ext.plan_tower import Tower
    from omnibal_ext.schedules.placement import Placement
    from omnibal_ext.schedules.schedule import build_schedule
    from omnibal_ext.schedules.weaving import in_time, woven
    from omnibal_ext.trained import Trained

    (tensor, pipeline), chain = ranks, model.chain
    layers = chain.index("word_embed")
    edges = [layers + (len(chain) - layers) * stage // pipeline for stage in range(pipeline + 1)]
    owners = tuple(layer % (tensor * pipeline) for layer in range(layers))
    tower = Tower(layers, owners, (tuple(range(pipeline)),) * MICROBATCHES, "ahead" if frozen else "bubbles", recompute)
    base = build_schedule("1f1b", pipeline, MICROBATCHES)
    lists = woven(base, in_time(base, MICROBATCHES, Placement.interleaved(pipeline), tower.beside))
    plan = Plan.from_cuts(
        chain, tuple(edges[1:-1]), num_microbatches=MICROBATCHES, tensor_model_parallel_size=tensor,
        trained=Trained(frozen),
        predicted={"stage_seconds": [1.0] * pipeline},
    )  # fmt: skip
    stages = tuple(StagePlan((first, end)) for first, end in pairwise(edges))
    words = tuple(" ".join(action.word for action in actions) for actions in lists)
    return replace(plan, stages=stages, tower=tower, lists=words)


def part_of(plan: Any, pack: Any, microbatch: int, tensor: int) -> Any:
    """This rank's units of a pack."""
    import torch
    from megatron.core import parallel_state

    from megatron.vlm.media import Images
    from megatron.vlm.microbatch import Microbatch
    from omnibal_ext.image_assignment import EncoderRank

    here = parallel_state.get_pipeline_model_parallel_rank()
    whole = Images.of(pack)
    units = tuple(map(prod, whole.grids)) or (1,) * whole.amount
    takes = EncoderRank(plan.tower.encoding_ranks, here, 0, tensor).takes(tuple(map(float, units)), microbatch)
    grids = tuple(grid for grid, own in zip(whole.grids, takes, strict=False) if own)
    images = Images(pieces=tuple((unit,) for unit in units), encodes=tuple(takes), grids=grids)
    values = torch.empty(images.amount, *whole.values.shape[1:], device="cuda")
    return Microbatch((), pack.samples, 0, media={"tiles": replace(images, values=values)})


def images_of(parts: list[Any]) -> dict[str, Any]:
    from megatron.vlm.pipeline.encoding import ToEncode

    return {"images": ToEncode(iter(parts))}


if __name__ == "__main__":
    every_rank(iteration, WAYS)
