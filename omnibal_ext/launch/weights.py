"""Weights of Hugging Face's, converted once for a run and kept in its folder."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from omnibal_ext.architectures.huggingface import CONFIG
from omnibal_ext.launch.processes import run_to_end


def converted_folder(source: Path, run_dir: Path) -> Path:
    """Where a run keeps its conversion of a folder; another one once the folder's files change."""
    digest = hashlib.sha256((source / CONFIG).read_bytes())
    for file in sorted(source.iterdir()):
        facts = file.stat()
        digest.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}".encode())
    return run_dir / f"weights-{digest.hexdigest()[:12]}"


def convert(tool: Path, source: Path, target: Path, quiet: bool) -> None:
    """Convert with tools/convert_checkpoint.py; the folder appears at once, also if several nodes convert.

    A failure ends this program with the tool's exit code.
    """
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
