"""Run under torchrun: each rank of a pipeline in turn stands still in an action until all have said where they stand.

standing.py FOLDER    writes what each rank said: a file STOOD-SPOKE each

No rank synchronises: one that does stands in its action, and waits there for what it has posted.
"""

import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.training import get_args

from megatron.vlm.pipeline.progress import Progress
from omnibal_ext.schedules.actions import Action
from tests.distributed import cases, harness
from tests.distributed.strict_transport import StrictCommunicator

PIPELINE = 3
STANDS_IN = Action("B", 1)
PATIENCE = timedelta(seconds=1)
LIMIT = 60.0
"""Seconds in which all ranks must have spoken."""


def main() -> None:
    folder = Path(sys.argv[1])
    harness.start(harness.SMALL, 1, PIPELINE)
    here = torch.distributed.get_rank()
    socket.gethostname = lambda: f"host-{here}"
    group = parallel_state.get_pipeline_model_parallel_group()
    communicator = StrictCommunicator(group, harness.edges(PIPELINE), seed=0)
    communicator.perhaps_synchronise = lambda: None  # type: ignore[method-assign]
    communicator.progress = Progress(PATIENCE)
    standing = 0

    @contextlib.contextmanager
    def watch(action: Action) -> Iterator[None]:
        if here == standing and action == STANDS_IN:
            wait_for_all(folder, standing)
        yield

    case = cases.Case(cases.Question("small", (), "all", "token"), "1f1b", 1, "none", False, False, seed=1)
    chain = harness.build_chain(get_args(), harness.SMALL)
    plan = case.plan(chain.kinds, PIPELINE)
    model = harness.build_model(chain, plan)
    executor = harness.executors(communicator, watch=watch)(plan.schedule, None)
    for standing in range(PIPELINE):
        torch.distributed.barrier()
        with (folder / f"{standing}-{here}").open("w") as said, contextlib.redirect_stderr(said):
            harness.run_iteration(model, plan, harness.sample_packs(), executor)
    harness.report({"stood": PIPELINE})
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def wait_for_all(folder: Path, standing: int) -> None:
    """Until every rank has spoken."""
    limit = time.monotonic() + LIMIT
    paths = [folder / f"{standing}-{rank}" for rank in range(PIPELINE)]
    while not all(path.exists() and path.read_text().endswith(" s\n") for path in paths):
        assert time.monotonic() < limit, "not every rank has said where it stands"
        time.sleep(0.05)


if __name__ == "__main__":
    main()
