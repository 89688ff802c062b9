"""Run under torchrun: every layout given must yield the loss and gradients of one process.

parity.py TENSOR PIPELINE REFERENCE.pt MODEL [flag...]     writes REFERENCE.pt where there is none, compares with it
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch
from megatron.core import parallel_state

from megatron.vlm.pipeline.executor import Executor
from omnibal_ext.chain import RECOMPUTABLE_KINDS
from omnibal_ext.plan import Plan
from tests.distributed import harness


def main() -> None:
    tensor, pipeline, path, name, *flags = sys.argv[1:]
    architecture = {"small": harness.SMALL, "wide_norm": harness.WIDE_NORM}[name]
    args = harness.start(architecture, int(tensor), int(pipeline), flags)
    chain = harness.build_chain(args, architecture)
    packs = harness.sample_packs(architecture, int(tensor) if args.sequence_parallel else 1)
    if not Path(path).exists():
        torch.save(harness.reference(chain, packs), path)
    expected = torch.load(path, weights_only=False)
    executor = Executor()
    worst = {}
    for label, plan in plans(chain.kinds, int(pipeline)):
        model = harness.build_model(chain, plan)
        loss = harness.run_iteration(model, chain, plan, packs, executor)
        worst[label] = harness.compare(model, expected, loss)
    gathered: list[dict[str, float]] = [{} for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, worst)
    if torch.distributed.get_rank() == 0:
        print("RESULT " + json.dumps({label: max(ranks[label] for ranks in gathered) for label in worst}))
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def plans(kinds: tuple[str, ...], pipeline: int) -> list[tuple[str, Plan]]:
    """Every single cut for two pipeline ranks; with and without recomputation."""
    recomputable = [layer for layer, kind in enumerate(kinds) if kind in RECOMPUTABLE_KINDS]
    every_cut = [()] if pipeline == 1 else [(cut,) for cut in range(1, len(kinds))]
    found = []
    for cuts in every_cut:
        edges = (0, *cuts, len(kinds))
        for what, layers in (("kept", []), ("recomputed", recomputable)):
            ids = [[layer for layer in layers if a <= layer < b] for a, b in pairwise(edges)]
            found.append((f"cuts {cuts} {what}", Plan.from_cuts(kinds, cuts, ids)))
    return found


if __name__ == "__main__":
    main()
