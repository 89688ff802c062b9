"""Run on two ranks: saves of a model that trains, in which a rank's file system fails at every place in turn.

failing_saves.py FOLDER sync|async    writes what each rank saw: a file RANK.json

Python tells an audit hook of every file that it opens, lists, makes or renames: the hook raises the error of a disk.
"""

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.training import get_args, training

from megatron.vlm import core_patches
from megatron.vlm.checkpoint import guard
from megatron.vlm.checkpoint.attempts import MOST, Attempts
from megatron.vlm.checkpoint.folder import Checkpoints, save_of
from megatron.vlm.ending import UnfinishedError
from omnibal_ext.plan import single_stage_plan
from tests.distributed import harness
from tests.endurance.kills import tensors

EVENTS = ("open", "os.mkdir", "os.listdir", "os.scandir", "os.rename")
BACKGROUND = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")


class Disk:
    """Counts what is done in a folder, and fails at one of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.fails_at = str(folder), 0, 0
        sys.addaudithook(self.see)

    def see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in EVENTS or not str(arguments[0]).startswith(self.folder):
            return
        self.count += 1
        if self.count == self.fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(arguments[0]))

    def fail_at(self, place: int) -> None:
        self.count, self.fails_at = 0, place


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    saves = folder / "saves"
    core_patches.patch_distributed_optimizer()
    core_patches.patch_padding()
    torch.use_deterministic_algorithms(True)  # then what nobody writes is NaN
    flags = ["--use-distributed-optimizer", "--save", str(saves), "--save-interval", "1"]
    attempts = guard.install(lambda: {"of": "a test"}, None, how == "async")
    args = harness.start(harness.SMALL, 1, 1, [*flags, *(BACKGROUND if how == "async" else ())])
    chain = harness.build_chain(get_args(), harness.SMALL)
    model = harness.build_model(chain, single_stage_plan(chain.kinds))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, use_distributed_optimizer=True), model)
    rank, disk = torch.distributed.get_rank(), Disk(saves)

    def save(iteration: int) -> None:
        training.save_checkpoint(iteration, model, optimizer, None, 0.0)
        training.maybe_finalize_async_save(blocking=True)

    places = every_place(disk, save, saves, attempts)
    lost = lost_writer(save, attempts) if how == "async" else []
    unwritten = [name for name, found in tensors(saves / "iter_0000001").items() if not found.isfinite().all()]
    found = {"places": places, "lost": lost, "three": three_in_a_row(disk, save), "unwritten": unwritten}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    harness.report({"ranks": args.world_size})
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def every_place(disk: Disk, save: Callable[[int], None], saves: Path, attempts: Attempts) -> list[dict[str, Any]]:
    """For each rank, and each thing that it does with files: what this rank knows then, and the saves that are left."""
    here, found, iteration = torch.distributed.get_rank(), list[dict[str, Any]](), 1
    save(iteration)
    for rank in range(torch.distributed.get_world_size()):
        disk.fail_at(0)
        iteration += 1
        save(iteration)
        places = torch.tensor([disk.count])
        torch.distributed.broadcast(places, rank)
        for place in range(1, int(places) + 1):
            before, iteration = Checkpoints(saves).newest().iteration, iteration + 1
            torch.distributed.barrier()
            disk.fail_at(place if here == rank else 0)
            save(iteration)
            disk.fail_at(0)
            torch.distributed.barrier()
            is_left, tracked = save_of(saves, iteration).path.exists(), Checkpoints(saves).tracked
            after = {"newest": Checkpoints(saves).newest().iteration, "left": is_left, "tracked": int(tracked or 0)}
            found.append({"failed": attempts.failed, "iteration": iteration, "before": before, "after": after})
            attempts.succeeded()
    return found


def lost_writer(save: Callable[[int], None], attempts: Attempts) -> list[str]:
    """The process that writes is killed: before a save, which starts another, and in one."""
    found = []
    for amid in (False, True):
        if torch.distributed.get_rank() == 1:
            kill_writer(amid)
        save(200)
        found.append(attempts.failed)
        attempts.succeeded()
    save(200)
    return [*found, attempts.failed]


def kill_writer(amid: bool) -> None:
    writer = PersistentAsyncCaller._persistent_process
    if not amid:
        writer.kill()
        writer.join()
        return
    schedule = PersistentAsyncCaller.schedule_async_call

    def schedule_and_kill(self: Any, request: Any) -> None:
        PersistentAsyncCaller.schedule_async_call = schedule
        os.kill(writer.pid, signal.SIGSTOP)
        threading.Timer(0.2, writer.kill).start()
        schedule(self, request)

    PersistentAsyncCaller.schedule_async_call = schedule_and_kill


def three_in_a_row(disk: Disk, save: Callable[[int], None]) -> list[str]:
    """What becomes of saves whose last file the first rank cannot write."""
    save(201)
    disk.fail_at(0)
    save(202)
    last, said = disk.count, list[str]()
    while len(said) < MOST + 1:
        disk.fail_at(last if torch.distributed.get_rank() == 0 else 0)
        try:
            save(211 + len(said))
            said.append("goes on")
        except UnfinishedError as error:
            return [*said, str(error)]
    return said


if __name__ == "__main__":
    main()
