"""Around Megatron's saving and loading: nothing is written without room for it, nothing loaded that is not whole.

Before a save    older saves that need not be kept are removed, newer ones of a run that was put back are put aside;
                 there must be room. The newest whole save is never touched.
After a save     every rank hashes what it wrote; integrity.json says that the save is whole; then Megatron's tracker
                 names it.
Before a load    all files are read and compared; a save that is damaged is passed over for the next older one.
"""

import errno
import os
import shutil
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.training import get_args, training
from megatron.training.async_utils import maybe_finalize_async_save
from megatron.training.checkpointing import load_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from megatron.vlm.checkpoint import background
from megatron.vlm.checkpoint.folder import ASIDE, INTEGRITY, Checkpoints, Save, none_whole, not_given
from megatron.vlm.checkpoint.integrity import damaged_files, gathered, once, seal_together
from megatron.vlm.checkpoint.safe import guarded
from megatron.vlm.models.adapters import left_out
from omnibal_ext.errors import UserError
from omnibal_ext.output import say
from omnibal_ext.units import size_text

SPARE = 2**20
"""Bytes: a disk with less is full."""
Describe = Callable[[], Mapping[str, Any]]


class Exports(Protocol):
    """What else is made of every save, by a process beside the first rank."""

    def export(self, save: Path) -> None:
        """Begin with a save that is whole."""

    def wait(self) -> None:
        """Until nothing of the saves is read."""


def install(
    describe: Describe, retain_interval: int | None, asynchronous: bool, exports: Exports | None = None
) -> None:
    """Guard the saves and loads of Megatron's loop. `describe`() is what a save says of its run.

    retain_interval: besides the two newest saves those of multiples of it are kept; None keeps all.
    asynchronous: saves are written by another process (--async-save).
    exports: on the first rank, what is made of every save.
    """
    save, write = training.save_checkpoint, dist_checkpointing.save

    def guarded_save(iteration: int, *arguments: Any, **named: Any) -> None:
        maybe_finalize_async_save(blocking=True)  # what is being written is no save yet, and would be cleared away
        folder = Path(get_args().save)
        if exports:
            exports.wait()  # older saves are removed
        once(lambda: _make_room(folder, iteration, retain_interval))
        try:
            save(iteration, *arguments, **named)
        except (Exception, CheckpointException) as error:
            if is_full(folder, error):
                raise UserError(
                    f"--save {folder}: no space left for the save of iteration {iteration}; make room and start again: "
                    "the run goes on from its last whole save"
                ) from error
            raise

    def sealed_write(state: Any, path: str, *arguments: Any, **named: Any) -> Any:
        request = write(state, path, *arguments, **named)
        finish = partial(seal, Path(path), dict(describe()))
        if request is None:
            finish()
        else:
            request.add_finalize_fn(finish)
        return request

    def seal(path: Path, run: Mapping[str, Any]) -> None:
        seal_together(path, run)
        if exports:
            exports.export(path)

    background.install(asynchronous)
    training.save_checkpoint = guarded_save
    training.load_checkpoint = load_whole
    dist_checkpointing.save = sealed_write


def is_full(folder: Path, error: BaseException) -> bool:
    """Whether writing failed because the disk, or the user's share of it, is full. Megatron may keep that to itself."""
    said = "".join(traceback.format_exception(error))
    words = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
    return any(word in said for word in words) or shutil.disk_usage(folder).free < SPARE


def load_whole(*arguments: Any, **named: Any) -> Any:
    """Megatron's `load_checkpoint`, of the newest save that is whole to the last byte; every rank calls it.

    Adapters that it has none of stay as they were drawn. Raises UserError if there is none, or it cannot be loaded
    safely.
    """
    args = get_args()
    save = believe(args)
    has_adapters = (save.path / INTEGRITY).exists() and save.integrity["run"].get("adapters")
    modules = () if has_adapters else (arguments[0] if isinstance(arguments[0], Sequence) else arguments[:1])
    with guarded(args.trust), left_out(modules):
        return load_checkpoint(*arguments, **named)


def believe(args: Namespace) -> Save:
    """Let the tracker of --load name a save that is whole. Weights that were given must be whole as they are."""
    own = args.load is not None
    checkpoints = Checkpoints(Path(args.load if own else args.pretrained_checkpoint))
    candidates = once(lambda: [(str(save.path), save.iteration) for save in checkpoints.candidates(args.ckpt_step)])
    faults: list[str] = []
    for path, iteration in candidates:
        save = Save(Path(path), iteration)
        fault = _fault(save, args.trust)
        if not fault:
            break
        faults.append(fault)
        if dist.get_rank() == 0:
            say(f"warning: {fault}: passed over")
    else:
        raise UserError(none_whole(checkpoints.folder, faults))
    if faults and not own:
        raise UserError(not_given(checkpoints.folder, faults[0], save))
    if faults and dist.get_rank() == 0:
        say(f"warning: going on from the newest whole save, {save.path}")
    if own and not args.ckpt_step:
        once(lambda: _track(checkpoints, save))
    return save


def _track(checkpoints: Checkpoints, save: Save) -> None:
    if not checkpoints.are_release and checkpoints.tracked != str(save.iteration):
        checkpoints.track(save)


def _fault(save: Save, trust: bool) -> str:
    """What is wrong with a save, found by all ranks together; "" if it is whole."""
    try:
        gathered(lambda: save.check(trust) if dist.get_rank() == 0 else None)
        if trust and not (save.path / INTEGRITY).exists():
            return ""
        damaged = damaged_files(save)
    except UserError as error:
        return str(error)
    return f"{save.path / damaged[0]}: damaged: its checksum is another one" if damaged else ""


def _make_room(folder: Path, iteration: int, retain_interval: int | None) -> None:
    """Raise UserError if the disk has less room than the newest save took."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(folder)
    kept = [save for save in checkpoints.candidates() if save.iteration != iteration]
    whole = [save for save in kept if (save.path / INTEGRITY).is_file()]
    for save in checkpoints.saves():
        if save not in kept:  # of a run that was put back to an older save, or an interrupted one
            _put_aside(save)
        elif retain_interval and save not in whole[:1] and save.iteration % retain_interval:
            shutil.rmtree(save.path, ignore_errors=True)
    if whole:
        needed, free = sum(file.stat().st_size for file in whole[0].path.iterdir()), shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(
                f"--save {folder}: no room for the save of iteration {iteration}: {size_text(needed)} needed, "
                f"{size_text(free)} free; make room and start again: the run goes on from {whole[0].path.name}"
            )


def _put_aside(save: Save) -> None:
    """Free a save's name; a whole one is kept under another."""
    aside = save.path.with_name(f"{save.path.name}{ASIDE}")
    shutil.rmtree(aside, ignore_errors=True)
    if (save.path / INTEGRITY).is_file():
        save.path.rename(aside)
    else:
        shutil.rmtree(save.path, ignore_errors=True)
