"""Run on one rank: the bytes that a split backward of one layer leaves for W, as the profiler finds them, by kind.

"untouched" are the weights that have no gradient when W is through; "whole" says of the ViT layers that are measured
of a model with windows, kind by kind, which see whole images.
"""

import sys

import torch
from megatron.training import get_args

from megatron.vlm.profiling.layer_costs import KindMeasurement
from tests.distributed import harness

TILES, TOKENS = 4, 64
KINDS = ("vit", "llm", "head")


def main() -> None:
    del sys.argv[1:]
    harness.start(harness.SMALL, 1, 1)
    chain = harness.build_chain(get_args(), harness.SMALL)
    measured = {kind: KindMeasurement(get_args(), chain, kind, {"tiles": TILES, "tokens": TOKENS}) for kind in KINDS}
    for kind in measured.values():
        kind.runs()["split"]()
    weights = [weight for kind in measured.values() for weight in kind.split.module.parameters()]
    untouched = sum(not weight.main_grad.any() for weight in weights)
    windows = harness.build_chain(get_args(), harness.NATIVE)
    vit = [KindMeasurement(get_args(), windows, kind, {"tiles": 16, "tokens": 8}).stage for kind in ("vit", "vit.1")]
    whole = [[layer.whole for layer in stage.links.values()] for stage in vit]
    found = {kind: found.split.late_bytes for kind, found in measured.items()}
    harness.report(found | {"untouched": untouched, "whole": whole})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
