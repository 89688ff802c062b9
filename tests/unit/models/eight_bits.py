"""Run on a rank with Transformer Engine's stand-in: one pack in bf16, in FP8, and in FP8 but for the ends.

Prints how often layers multiplied in eight bits, how far each loss is from that in bf16, how far the gradients of
layers that compute again are from those of layers that do not, and how far the loss is where a copy of the tower stands
beside.
"""

import json
import sys

import torch
from megatron.training import get_args
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

from megatron.vlm.microbatch import sequence_multiple
from megatron.vlm.models.alone import alone
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.stage import Stage
from tests.distributed import harness


def gradients(chain: Chain, multiple: int, *recompute: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    stage = Stage(chain, 0, 11, *recompute)
    for weight in stage.parameters():
        weight.data.normal_(0, 0.1)
    stage(harness.sample_packs("all", multiple)[7]).mean().backward()
    return [weight.grad for weight in stage.parameters() if weight.grad is not None]


def with_tower_beside(chain: Chain, multiple: int) -> tuple[float, int]:
    """The loss where a copy of the tower makes the image tokens, and how often that multiplied in eight bits."""
    layers, pack = chain.kinds.index("word_embed"), harness.sample_packs("all", multiple)[7]
    FP8GlobalStateManager.ENTERED = 0
    with alone():
        tokens = Stage(chain.whole(), 0, layers)(pack)
    entered = FP8GlobalStateManager.ENTERED
    stage = Stage(chain, layers, 11, owned=tuple(range(layers)))
    stage.set_input_tensor(tokens)
    loss: float = stage(pack).mean().item()
    return loss, entered


def main() -> None:
    del sys.argv[1:]
    flags = "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --no-gradient-accumulation-fusion"
    args = harness.start(harness.SMALL, 1, 1, flags.split())
    eight_bits, multiple = args.fp8, sequence_multiple(args)
    found: dict[str, float] = {"multiple": multiple}
    losses = {}
    for name, fp8, ends in (("bf16", None, False), ("fp8", eight_bits, False), ("ends in bf16", eight_bits, True)):
        args.fp8, args.first_last_layers_bf16 = fp8, ends
        FP8GlobalStateManager.ENTERED = 0
        stage = Stage(harness.build_chain(get_args(), harness.SMALL), 0, 11)
        loss = stage(harness.sample_packs("all", multiple)[7]).mean()
        loss.backward()
        found[f"{name}: layers"] = FP8GlobalStateManager.ENTERED
        losses[name] = loss.item()
        assert all(torch.isfinite(weight.grad).all() for weight in stage.parameters())
    args.fp8, args.first_last_layers_bf16 = eight_bits, False
    chain = harness.build_chain(get_args(), harness.SMALL)
    again = tuple(layer for layer, kind in enumerate(chain.kinds) if kind == "llm")
    kept = gradients(chain, multiple)
    pairs = zip(kept, gradients(chain, multiple, again), strict=True)
    found["layers again: difference"] = max((one - other).abs().max().item() for one, other in pairs)
    beside, found["tower beside: layers"] = with_tower_beside(chain, multiple)
    found["tower beside: difference"] = abs(beside / losses["fp8"] - 1)
    found |= {f"{name}: difference": abs(loss / losses["bf16"] - 1) for name, loss in losses.items()}
    print("RESULT " + json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
