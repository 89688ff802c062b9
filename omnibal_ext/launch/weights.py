"""Weights of Hugging Face's, converted once and kept beside their folder."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from omnibal_ext.architectures.huggingface import CONFIG, weight_files
from omnibal_ext.launch.processes import run_to_end

CHECKPOINT = "latest_checkpointed_iteration.txt"
"""In every folder of checkpoints."""


def is_unconverted(folder: Path) -> bool:
    """Whether a folder holds a model of Hugging Face's with its weights."""
    return (folder / CONFIG).is_file() and bool(weight_files(folder))


def holds_weights(folder: Path) -> bool:
    """Whether a run can start from a folder: a model of Hugging Face's, or a checkpoint."""
    return (folder / CHECKPOINT).is_file() or is_unconverted(folder)


def converted_folder(source: Path, run_dir: Path) -> Path:
    """Where the conversion of a folder is kept: beside it, or in the run's folder where nothing may be written there.

    Another one once the folder's files change.
    """
    source = source.resolve()
    digest = hashlib.sha256((source / CONFIG).read_bytes())
    for file in sorted(source.iterdir()):
        facts = file.stat()
        digest.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}".encode())
    name = f"{source.name}-converted-{digest.hexdigest()[:12]}"
    return (source.parent if os.access(source.parent, os.W_OK) else run_dir) / name


def convert(tool: Path, source: Path, target: Path, quiet: bool) -> None:
    """Convert with tools/convert_checkpoint.py; the folder appears at once, also if several nodes convert.

    A failure ends this program with the tool's exit code.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    building = target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}")
    command = [sys.executable, "-W", "ignore", str(tool), "--from-hf", str(source), "--output-dir", str(building)]
    try:
        done = run_to_end(command, stdout=subprocess.DEVNULL if quiet else None)
        if done.returncode:
            sys.exit(done.returncode)
        if not target.exists():
            building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
