"""Wraps Megatron's saving and loading: checks disk space before a save, and checksums before a load.

Before a save    Older saves beyond the retention are removed; saves newer than the one the run resumed from are renamed
                 (`folder.SUPERSEDED`); there must be room. The newest complete save is never touched.
After a save     Every rank hashes what it wrote; integrity.json marks the save as complete; then the tracker names it.
                 One that fails is removed (`attempts`).
Before a load    All files are hashed; a damaged save is skipped for the next older one.
"""

import contextlib
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import LocalNonpersistentObject, ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, is_main_replica
from megatron.training import checkpointing, get_args, training
from megatron.training.async_utils import is_empty_async_queue, maybe_finalize_async_save
from megatron.training.checkpointing import load_checkpoint

from megatron.vlm.checkpoint import background
from megatron.vlm.checkpoint.attempts import Attempts, note_files
from megatron.vlm.checkpoint.folder import (
    INTEGRITY,
    SUPERSEDED,
    Checkpoints,
    Save,
    incomplete_first_weights,
    iteration_of,
    no_complete_save,
    save_of,
)
from megatron.vlm.checkpoint.integrity import damaged_files, on_all_ranks, on_first_rank, seal_by_all_ranks
from megatron.vlm.checkpoint.safe import safe_unpickling
from megatron.vlm.models.adapters import left_out
from omnibal_ext.errors import UserError
from omnibal_ext.output import say
from omnibal_ext.units import in_bytes

Describe = Callable[[], Mapping[str, Any]]


class Exports(Protocol):
    """Exports every save, in a background process of the first rank, to Hugging Face's format."""

    def export(self, save: Path) -> None:
        """Start to export a complete save."""

    def wait(self) -> None:
        """Wait until no save is being read."""


def install(
    describe: Describe, retain_interval: int | None, asynchronous: bool, exports: Exports | None = None
) -> Attempts:
    """Wrap the saves and loads of Megatron's loop, and return the saves' attempts.

    describe: returns the facts of the run that are written into integrity.json.
    retain_interval: keep the two newest saves and those of its multiples; None keeps all.
    asynchronous: another process writes the saves (--async-save).
    exports: exports every save; on the first rank only.
    """
    saving = Saving(describe, retain_interval, asynchronous, exports)
    background.install(asynchronous)
    note_files(saving.attempts)
    training.save_checkpoint = saving.save
    training.maybe_finalize_async_save = saving.finalize
    training.load_checkpoint = load_complete
    dist_checkpointing.save = saving.write
    return saving.attempts


class Saving:
    """Megatron's functions that save, wrapped (see `install`)."""

    def __init__(
        self, describe: Describe, retain_interval: int | None, asynchronous: bool, exports: Exports | None
    ) -> None:
        self.describe, self.retain_interval = describe, retain_interval
        self.asynchronous, self.exports = asynchronous, exports
        self.attempts = Attempts()
        self._save, self._write = training.save_checkpoint, dist_checkpointing.save
        self._finalize = maybe_finalize_async_save
        self._written: Path | None = None
        """The save that another process is writing."""

    def save(self, iteration: int, *arguments: Any, **named: Any) -> None:
        """Start a save in place of `save_checkpoint`, and without --async-save finish it."""
        self.finalize(blocking=True)  # else `_make_room` would remove the unfinished one
        folder = Path(get_args().save)
        if self.exports:
            self.exports.wait()  # `_make_room` removes saves
        path, self.attempts.is_begun = save_of(folder, iteration).path, False
        with self.attempts.tried(path):
            on_all_ranks(background.renew)
            on_first_rank(lambda: _make_room(folder, iteration, self.retain_interval))
            self.attempts.is_begun = True
            with _tracker_left_alone():
                self._save(iteration, *arguments, **named)
            if self.asynchronous:
                self._written = path
            else:
                self._accept(path)

    def finalize(self, blocking: bool = False, terminate: bool = False) -> None:
        """Finish a save that has been written, in place of `maybe_finalize_async_save`; with `blocking` wait for it."""
        if self._written:
            with self.attempts.tried(self._written):
                self._finalize(blocking)
                if not is_empty_async_queue():
                    return
                self._accept(self._written)
            self._written = None
        self._finalize(blocking, terminate)

    def write(self, state: Any, path: str, *arguments: Any, **named: Any) -> Any:
        """Write and seal a state in place of `dist_checkpointing.save`; or return the request that does both later."""
        run = on_first_rank(lambda: dict(self.describe()))
        drop_copies(state)
        request = self._write(state, path, *arguments, **named)
        if request is None:
            self._seal(Path(path), run)
        else:
            self.attempts.agree()
            request.add_finalize_fn(partial(self._seal, Path(path), run))
        return request

    def _seal(self, path: Path, run: Mapping[str, Any]) -> None:
        self.attempts.agree()
        seal_by_all_ranks(path, run)
        on_first_rank(lambda: Checkpoints(path.parent).track(Save(path, iteration_of(path))))

    def _accept(self, path: Path) -> None:
        """Count the save as whole unless a rank has noted an error."""
        self.attempts.agree()
        self.attempts.succeeded()
        if self.exports:
            self.exports.export(path)


@contextlib.contextmanager
def _tracker_left_alone() -> Iterator[None]:
    """Make a context in which Megatron does not write the tracker: `Saving` does in one step, for sealed saves."""
    name_of = checkpointing.get_checkpoint_tracker_filename
    checkpointing.get_checkpoint_tracker_filename = lambda _: os.devnull
    try:
        yield
    finally:
        checkpointing.get_checkpoint_tracker_filename = name_of


def drop_copies(state: ShardedStateDict) -> None:
    """Keep in `state`, in place, one of a rank's shards with the same key and offset: the main replica if present."""
    kept: dict[Any, ShardedTensor] = {}
    for shard in nested_values(state):
        if isinstance(shard, ShardedTensor) and (_position(shard) not in kept or is_main_replica(shard.replica_id)):
            kept[_position(shard)] = shard

    def without_copies(value: Any) -> Any:
        is_copy = isinstance(value, ShardedTensor) and kept[_position(value)] is not value
        return LocalNonpersistentObject(None) if is_copy else value

    dict_list_map_inplace(without_copies, state)


def _position(shard: ShardedTensor) -> tuple[Any, ...]:
    return shard.key, shard.global_offset, str(shard.flattened_range)


def load_complete(*arguments: Any, **named: Any) -> Any:
    """Call Megatron's `load_checkpoint` on the newest save whose checksums all match; collective.

    Adapters keep their initial values if the save has none. Raises UserError if there is no such save, or if it cannot
    be loaded safely.
    """
    args = get_args()
    save = select_save(args)
    has_adapters = (save.path / INTEGRITY).exists() and save.integrity["run"].get("adapters")
    modules = () if has_adapters else (arguments[0] if isinstance(arguments[0], Sequence) else arguments[:1])
    with safe_unpickling(args.trust), left_out(modules):
        return load_checkpoint(*arguments, **named)


def select_save(args: Namespace) -> Save:
    """Return the newest save whose checksums match, and track it (--load); for --from only the first candidate. Raises
    UserError if there is none; collective."""
    resumes = args.load is not None
    checkpoints = Checkpoints(Path(args.load if resumes else args.pretrained_checkpoint))
    candidates = on_first_rank(
        lambda: [(str(save.path), save.iteration) for save in checkpoints.candidates(args.ckpt_step)]
    )
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
        raise UserError(no_complete_save(checkpoints.folder, faults))
    if faults and not resumes:
        raise UserError(incomplete_first_weights(checkpoints.folder, faults[0], save))
    if faults and dist.get_rank() == 0:
        say(f"warning: going on from the newest whole save, {save.path}")
    if resumes and not args.ckpt_step:
        on_first_rank(lambda: _track(checkpoints, save))
    return save


def _track(checkpoints: Checkpoints, save: Save) -> None:
    if not checkpoints.are_release and checkpoints.tracked != str(save.iteration):
        checkpoints.track(save)


def _fault(save: Save, trust: bool) -> str:
    """Return what is wrong with a save, "" if nothing; collective."""
    try:
        on_all_ranks(lambda: save.check(trust) if dist.get_rank() == 0 else None)
        if trust and not (save.path / INTEGRITY).exists():
            return ""
        damaged = damaged_files(save)
    except UserError as error:
        return str(error)
    return f"{save.path / damaged[0]}: damaged: its checksum is another one" if damaged else ""


def _make_room(folder: Path, iteration: int, retain_interval: int | None) -> None:
    """Remove saves beyond the retention, and rename those newer than the save that the run resumed from. Raises
    UserError if the disk has less room than the newest save took."""
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(folder)
    kept = [save for save in checkpoints.candidates() if save.iteration != iteration]
    complete = [save for save in kept if (save.path / INTEGRITY).is_file()]
    for save in checkpoints.saves():
        if save not in kept:  # newer than the save the run resumed from, or interrupted
            _rename_superseded(save)
        elif retain_interval and save not in complete[:1] and save.iteration % retain_interval:
            shutil.rmtree(save.path, ignore_errors=True)
    if complete:
        needed, free = sum(file.stat().st_size for file in complete[0].path.iterdir()), shutil.disk_usage(folder).free
        if needed > free:
            raise UserError(f"no room: {in_bytes(needed)} needed, {in_bytes(free)} free")


def _rename_superseded(save: Save) -> None:
    """Rename a complete save, remove an incomplete one."""
    renamed = save.path.with_name(f"{save.path.name}{SUPERSEDED}")
    shutil.rmtree(renamed, ignore_errors=True)
    if (save.path / INTEGRITY).is_file():
        save.path.rename(renamed)
    else:
        shutil.rmtree(save.path, ignore_errors=True)
