"""Saves that fail: all ranks know of it, training goes on, and the next save tries again.

What a rank alone meets is noted, not raised (`Attempts.noting`): it goes on with core's save, in whose collectives the
other ranks wait for it. Before a save counts all ranks exchange their notes (`Attempts.agree`). So a save fails on all
ranks or on none.
"""

import contextlib
import errno
import os
import shutil
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
from megatron.training import checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from megatron.vlm.checkpoint.folder import INTEGRITY, Checkpoints, iteration_of
from megatron.vlm.checkpoint.integrity import on_all_ranks, on_first_rank
from megatron.vlm.ending import UnfinishedError
from omnibal_ext.errors import UserError
from omnibal_ext.output import say

MOST = 3
"""Failed saves in a row that end a run."""
SPARE = 2**20
"""Free bytes below which a disk is full."""
LONGEST = 500
"""Characters of a reason that are printed."""


class Attempts:
    """The saves of a run, each of which may fail."""

    def __init__(self) -> None:
        self.failed = ""
        """Why the last save failed; "" if it did not."""
        self.in_row = 0
        self.is_begun = False
        """Whether the folder of the present save is its own, not that of an older save of the same iteration."""
        self.notes: list[str] = []
        """What this rank has met in the present save."""

    def note(self, error: OSError) -> None:
        """Note an error that this rank alone may have met."""
        self.notes.append(f"rank {dist.get_rank()} on {socket.gethostname()}: {error}")

    def noting(self, work: Callable[..., Any], instead: Callable[..., Any] = lambda *_, **__: None) -> Any:
        """Return a function that does `work`; an OSError in it is noted, and `instead` gives the result."""

        @wraps(work)
        def noted(*arguments: Any, **named: Any) -> Any:
            try:
                return work(*arguments, **named)
            except OSError as error:
                self.note(error)
                return instead(*arguments, **named)

        return noted

    def agree(self) -> None:
        """Raise UserError on all ranks if one of them has noted an error; collective."""
        on_all_ranks(self._raise_noted)

    def _raise_noted(self) -> None:
        if self.notes:
            raise UserError(self.notes[0])

    @contextlib.contextmanager
    def tried(self, save: Path) -> Iterator[None]:
        """Make a context for a part of a save, whose errors all ranks raise alike: the save fails then, and is removed.

        Raises UnfinishedError if it is the last of `MOST` in a row; otherwise a line is printed.
        """
        try:
            yield
        except (UserError, CheckpointException) as error:
            self.in_row += 1
            self.failed = self._reason(save, error)
            if self.in_row == MOST:
                raise UnfinishedError(f"{self.failed}; it is the last of {MOST} in a row") from error
            if dist.get_rank() == 0:
                say(f"warning: {self.failed}; training goes on, and the next save tries again", error=True)

    def succeeded(self) -> None:
        """Note that the present save is whole."""
        self.in_row, self.failed = 0, ""

    def _reason(self, save: Path, error: BaseException) -> str:
        """Remove a failed save and return what is said of it; collective."""
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [*self.notes, _cause(error)])
        self.notes.clear()
        reason = next((reason for of_rank in everyone for reason in of_rank if reason), "nothing says why")
        return on_first_rank(lambda: _left(save, reason, is_full(save.parent, error), self.is_begun))

    @contextlib.contextmanager
    def ends_saved(self) -> Iterator[None]:
        """Make a context around a run that raises UnfinishedError if the run ends well but its last save failed."""
        try:
            yield
        except SystemExit as ended:
            if ended.code == 0:
                self._refuse_unsaved()
            raise
        self._refuse_unsaved()

    def _refuse_unsaved(self) -> None:
        if self.failed:
            raise UnfinishedError(f"{self.failed}; the run has ended without it")


def note_files(attempts: Attempts) -> None:
    """Make Megatron's steps that write files note errors, not raise them: other ranks wait in collectives."""
    noting, writer = attempts.noting, filesystem_async.FileSystemWriterAsync
    checkpointing.ensure_directory_exists = noting(checkpointing.ensure_directory_exists)
    serialization.save_config = noting(serialization.save_config)
    serialization.maybe_msc = SimpleNamespace(Path=partial(_Folder, noting(_listed, lambda _: [])))
    writer.finish = noting(writer.finish)
    writer.prepare_local_plan = noting(writer.prepare_local_plan, lambda _, plan: plan)
    for caller in (async_utils.PersistentAsyncCaller, async_utils.TemporalAsyncCaller):
        caller.schedule_async_call = noting(caller.schedule_async_call)
    add = async_utils.AsyncRequest.add_finalize_fn
    async_utils.AsyncRequest.add_finalize_fn = lambda request, work: add(request, noting(work))


class _Folder:
    """Stand-in for a path with as much of it as core asks of a save's folder."""

    def __init__(self, listed: Callable[[Path], Sequence[Path]], path: str) -> None:
        self._listed, self._path = listed, Path(path)

    def iterdir(self) -> Iterator[Path]:
        return iter(self._listed(self._path))

    def exists(self) -> bool:
        return self._path.exists()


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def is_full(folder: Path, error: BaseException) -> bool:
    """Say whether writing failed because the disk or the quota is full; Megatron's error may not say so."""
    said = "".join(traceback.format_exception(error))
    if any(os.strerror(number) in said for number in (errno.ENOSPC, errno.EDQUOT)):
        return True
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free < SPARE
    return False


def _cause(error: BaseException) -> str:
    """Return the first cause that an error names, in a line; "" where it is known on another rank."""
    if not isinstance(error, CheckpointException):
        return _in_line(error)
    return next((f"rank {rank}: {_in_line(cause)}" for rank, (cause, _) in error.failures.items()), "")


def _in_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:LONGEST]


def _left(save: Path, reason: str, full: bool, is_begun: bool) -> str:
    """Remove what was written of a save, and return what failed, why, and which save is left."""
    if is_begun:
        with contextlib.suppress(OSError):  # first, so that no part of it is taken for a save
            (save / INTEGRITY).unlink()
        shutil.rmtree(save, ignore_errors=True)
    left = "the folder cannot be read"
    with contextlib.suppress(OSError):
        whole = [one for one in Checkpoints(save.parent).candidates() if (one.path / INTEGRITY).is_file()]
        left = f"{whole[0].path.name} is whole" if whole else "no save is whole yet"
    why = f"no space left, make room ({reason})" if full else reason
    return f"--save {save.parent}: the save of iteration {iteration_of(save)} failed: {why}; {left}"
