"""Fetches a model of the Hugging Face hub, and converts its weights once, next to their folder or in the run's."""

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil

from omnibal_ext.architectures.folder import CONFIG, read_config, weight_files
from omnibal_ext.architectures.presets import hub_name
from omnibal_ext.errors import UserError, how_to_install
from omnibal_ext.families.registry import MODELS
from omnibal_ext.files.folders import building
from omnibal_ext.launch.processes import run_python
from omnibal_ext.output import say
from omnibal_ext.reading.document import MOST_BYTES, decode
from omnibal_ext.reading.files import read_bytes
from omnibal_ext.reading.stores import named_stores
from omnibal_ext.units import GIB

CHECKPOINT = "latest_checkpointed_iteration.txt"
"""A file that Megatron writes into every checkpoint folder."""
CACHED = re.compile(r"/models--(?:[^/]+--)?([^/]+)/snapshots/[^/]+$")
"""Path of a model in the Hugging Face cache, where we write nothing; group 1 is the model's name."""
BYTES_COMPARED = 4
"""Memory for comparing logits, per byte of bf16 weights: two models in fp32."""


def is_unconverted(folder: Path) -> bool:
    """Whether a folder has a Hugging Face model with weights."""
    return (folder / CONFIG).is_file() and bool(weight_files(folder))


def holds_weights(folder: Path) -> bool:
    """Whether a folder has a Hugging Face model with weights, or a checkpoint."""
    return (folder / CHECKPOINT).is_file() or is_unconverted(folder)


def converted_folder(source: Path, run_dir: Path) -> Path:
    """Return the folder for the converted weights of `source`: next to it or, if that is not writable or in the
    Hugging Face cache, in the run's folder. The name has a hash of the names, sizes and times of the folder's files."""
    source = source.resolve()
    digest = hashlib.sha256(read_bytes(source / CONFIG, "download it again", MOST_BYTES))
    for file in sorted(source.iterdir()):
        facts = file.stat()
        digest.update(f"{file.name} {facts.st_size} {facts.st_mtime_ns}".encode())
    cached = CACHED.search(str(source))
    name = f"{cached[1] if cached else source.name}-converted-{digest.hexdigest()[:12]}"
    return (run_dir if cached or not os.access(source.parent, os.W_OK) else source.parent) / name


def convert(tool: Path, source: Path, target: Path, data: Path | None, quiet: bool) -> None:
    """Convert with omnibal convert, atomically; several nodes may do so at the same time.

    With `data`, a dataset, logits are compared with transformers' on two of its samples if this machine can. If the
    tool fails, this program exits with the same code.
    """
    with building(target, keeps=True) as folder:
        words: list[object] = [tool, "--from-hf", source, "--output-dir", folder]
        if data and not (why_not := _not_comparable(source)):
            words += ["--check", "--data", data, *(f"--stores={store}" for store in named_stores())]
        elif data and not quiet:
            say(f"{source}: converted without comparing logits with transformers': {why_not}")
        done = run_python(*words, "--json", stdout=subprocess.PIPE)
        if done.returncode:
            sys.exit(done.returncode)
    if not quiet:
        found = decode(done.stdout.splitlines()[-1].encode())
        difference = found["logit_difference"]
        compared = "" if difference is None else f"; logits differ from transformers' by {difference:.1e}"
        say(f"converted to {target}: {found['weights']:,} weights, {found['parameters']:,} parameters{compared}")


WEIGHTS, SETTINGS = ["*.safetensors"], ["*.json", "*.jinja", "*.model", "*.txt"]
"""What a model's folder needs here: weights; configurations, chat template, tokenizer."""


def downloaded(name: str, quiet: bool, weights: bool = True) -> str:
    """The folder of a model of the hub in its cache (`HF_HOME`), fetched as far as it is not there.

    `name`: OWNER/MODEL, OWNER/MODEL@REVISION, or the URL of a page. The folder's name is the commit. Without `weights`
    it has what conversations are read by, a few megabytes.

    Raises:
        UserError: the name is none of the hub's, or the hub does not give it.
    """
    found = hub_name(name)
    if Path(name).exists() or not found:
        raise UserError(
            "--download fetches OWNER/MODEL, or OWNER/MODEL@REVISION, of the Hugging Face hub; "
            f"{name} is no such name: leave it out"
        )
    model, revision = found
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"--download needs huggingface_hub: {how_to_install('train')}") from None
    try:
        wanted = WEIGHTS * weights + SETTINGS
        files = snapshot_download(model, revision=revision, allow_patterns=wanted, dry_run=True)
        missing = sum(file.file_size or 0 for file in files if file.will_download)
        if missing and not quiet:
            say(f"{model}: {missing / 1e9:.2f} GB are downloaded, and kept in the hub's cache")
        return str(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:
        reason = re.sub(r"\s+", " ", str(error)).strip()[:300]
        raise UserError(
            f"{name}: not to be had from the hub ({reason}); give a folder that has been downloaded"
        ) from None


def pinned(name: str, folder: str) -> str:
    """OWNER/MODEL@COMMIT of what `downloaded` has found for a name."""
    found = hub_name(name)
    assert found
    return f"{found[0]}@{Path(folder).name}"


def _not_comparable(source: Path) -> str:
    """Return why logits cannot be compared on this machine; "" if they can."""
    model = MODELS.get(str(read_config(source / CONFIG).get("model_type")))
    if model and not model.transformers:
        return "its code is in its repository, and is not run"
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    files = {source / name for name in weight_files(source).values()}
    stored = sum(file.stat().st_size for file in files if file.exists())
    needs, available = stored * BYTES_COMPARED / GIB, psutil.virtual_memory().available / GIB
    return f"it takes up to {needs:.0f} GiB of memory, {available:.0f} are available" if needs > available else ""
