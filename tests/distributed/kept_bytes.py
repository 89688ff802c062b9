"""Run on two tensor-parallel ranks: what the profiler says that layers keep, with sequence parallelism and without.

Prints, for ViT and language layers, what sharing saves over the least that it must: half of the inputs and outputs of
both norms, and of the branches before LayerScale.
"""

import sys

import torch
from megatron.training import get_args

from megatron.vlm.profiling.layer_costs import KindMeasurement
from tests.distributed import harness

TILES, TOKENS = 4, 63  # the tokens are no whole number of shares
NUMBER = 4  # bytes, fp32


def main() -> None:
    del sys.argv[1:]
    harness.start(harness.SMALL, 2, 1)
    kept = {share: measure(share) for share in (False, True)}
    vision, language = harness.SMALL.vision, harness.SMALL.language
    least = {
        "vit": 6 * vision.hidden_size * TILES * vision.tokens_per_tile * NUMBER / 2,
        "llm": 4 * language.hidden_size * TOKENS * NUMBER / 2,
    }
    harness.report({kind: (kept[False][kind] - kept[True][kind]) / least[kind] for kind in least})
    torch.distributed.destroy_process_group()


def measure(sequence_parallel: bool) -> dict[str, float]:
    args = get_args()
    args.sequence_parallel = sequence_parallel
    chain = harness.build_chain(args, harness.SMALL)
    return {
        kind: KindMeasurement(args, chain, kind, {"tiles": TILES, "tokens": TOKENS}).kept[""] for kind in ("vit", "llm")
    }


if __name__ == "__main__":
    main()
