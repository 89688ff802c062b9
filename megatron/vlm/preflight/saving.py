"""Checks of what a run writes: permissions, other runs' files, disk space for its checkpoints."""

import os
import shutil
from argparse import Namespace
from pathlib import Path

from megatron.vlm.checkpoint.folder import Checkpoints
from megatron.vlm.preflight.findings import Note
from megatron.vlm.preflight.machine import parameters
from omnibal_ext.adapters import Adapters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.errors import UserError
from omnibal_ext.files.folders import refuse_within
from omnibal_ext.run_metrics import INPUTS, noted_inputs
from omnibal_ext.units import in_bytes


def check_saving(args: Namespace, architecture: Architecture, iteration: int, is_packed: bool = True) -> str:
    """Return number and size of the checkpoints of a run from `iteration` on; without packs the number is unknown.

    Raises UserError if they cannot be written, or the disk has no room for two.
    """
    metrics = args.metrics_file and str(Path(args.metrics_file).parent)
    read = {"--data": args.data, "--packs": args.packs, "--eval-data": args.eval_data, "--eval-packs": args.eval_packs}
    written = {
        "--save": args.save,
        "--tensorboard-dir": args.tensorboard_dir,
        "--metrics-file": metrics,
        "--cache-tiles": args.cache_tiles,
    }
    for flag, name in written.items():
        if name:
            refuse_within(flag, Path(name), read)
            check_writable(Path(name))
    if not args.save:
        return Note("none: without --save FOLDER --save-interval N nothing of this run is kept")
    size, count = checkpoint_bytes(args, architecture), checkpoints_kept(args, iteration)
    free = shutil.disk_usage(nearest_existing(Path(args.save))).free
    each, there = in_bytes(size), f"in {args.save}, {in_bytes(free)} free"
    needed = f"{count} x {each} {there}" if is_packed else f"each {each} {there}"
    if size * min(count, 2) > free:
        kept = f", --cache-tiles {args.cache_tiles} may be deleted" if args.cache_tiles else ""
        raise UserError(f"--save {args.save}: no room for two checkpoints: {needed}; make room{kept}")
    if args.no_save_optim:
        return Note(
            f"{needed}, without the optimizer's state (--no-save-optim): a run that is interrupted cannot go on"
        )
    if is_packed and size * count > free:
        raised = "--save-retain-interval" if args.save_retain_interval else "--save-interval"
        fewer = "" if args.save_retain_interval else ", or keep fewer by --save-retain-interval"
        return Note(f"{needed}: not all fit; raise {raised}{fewer}")
    return needed


def check_run_folder(args: Namespace, run_dir: Path) -> str:
    """Raise UserError if another run has written to a file or folder outside of `run_dir` that this run writes to.

    Paths in `run_dir`, and those noted there by an earlier start, are this run's.
    """
    noted = {Path(path).resolve() for path in noted_inputs(run_dir).values()}
    for flag, name in (("--metrics-file", args.metrics_file), ("--tensorboard-dir", args.tensorboard_dir)):
        if not name or not _is_used(Path(name)):
            continue
        written = Path(name).resolve()
        if run_dir.resolve() not in written.parents and written not in noted:
            raise UserError(f"{flag} {name}: has figures of another run, which would mix; choose another")
    save = Path(args.save) if args.save else None
    if save and (save / INPUTS).exists() and save.resolve() != run_dir.resolve() and not Checkpoints(save).exist:
        raise UserError(f"--save {save}: is another run's folder; choose another, such as {run_dir / 'checkpoints'}")
    return f"{run_dir}: what it has, and what the run writes, is its own"


def _is_used(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0


def check_writable(folder: Path) -> None:
    """Raise UserError unless the folder, or the nearest existing parent, is writable."""
    parent = nearest_existing(folder)
    if not parent.is_dir():
        raise UserError(f"{folder}: {parent} is a file; choose another folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"{folder}: {parent} may not be written to; choose another folder or change its permissions")


def nearest_existing(folder: Path) -> Path:
    """Return the folder or its nearest existing parent."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.exists())


def checkpoint_bytes(args: Namespace, architecture: Architecture) -> int:
    """Return the bytes of a checkpoint: weights, and the optimizer state of the trained ones with their fp32 copies."""
    weights, trained = parameters(architecture, tuple(args.freeze), Adapters.of(args))
    half = args.bf16 or args.fp16
    state = 0 if args.no_save_optim else 12 if half else 8
    return weights * (2 if half else 4) + trained * state


def checkpoints_kept(args: Namespace, iteration: int) -> int:
    """Return how many checkpoints a run from `iteration` on has on disk at most, older ones not counted."""
    left = max(0, (args.train_iters or 0) - iteration)
    written = -(-left // args.save_interval)
    if not args.save_retain_interval:
        return written
    return min(written, left // args.save_retain_interval + 3)  # and the two newest, and the one being written
