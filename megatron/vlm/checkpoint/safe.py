"""Loads checkpoints without running code from them: their pickles may name only the classes that checkpoints need."""

import io
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from omnibal_ext.errors import UserError

CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
                 "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")
} | {
    ("torch.distributed.checkpoint.planner", name)
    for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}  # fmt: skip
"""The classes in a .metadata file; torch's dtypes and layouts are allowed too."""
FORCED = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""An environment variable that lets torch unpickle anything unless `weights_only` is passed; core omits it once."""


class _TableOfContents(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in CLASSES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch" and isinstance(kind := getattr(torch, name, None), torch.dtype | torch.layout):
            return kind
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")


def _member(kind: Any, name: str) -> Any:
    """getattr for members of enumerations only, which Python before 3.11.4 pickles this way."""
    if isinstance(kind, EnumType) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError("it names builtins.getattr, which no checkpoint needs of anything but enumerations")


def read_contents(path: Path) -> Metadata:
    """Read a save's .metadata. Raises UserError if it is damaged or names another class."""
    try:
        with path.open("rb") as file:
            contents = _TableOfContents(file).load()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); is it a distributed checkpoint?") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise UserError(_refused(path, error)) from None
    if not isinstance(contents, Metadata):
        raise UserError(_refused(path, "it is no table of contents"))
    return contents


@contextmanager
def safe_unpickling(trust: bool) -> Iterator[None]:
    """Inside, torch's checkpoint reader unpickles only allowed classes, whatever `FORCED` says; with `trust` anything.

    Raises UserError for a refused file. Megatron's own reader keeps its list (`core.safe_globals`).
    """
    if trust:
        yield
        return
    read_metadata, load_bytes = FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes
    refusals: list[UserError] = []
    forced = os.environ.pop(FORCED, None)

    def read_safely(self: FileSystemReader, *arguments: Any, **named: Any) -> Metadata:
        try:
            read_contents(Path(self.path) / ".metadata")
        except UserError as refusal:
            refusals.append(refusal)
            raise
        return read_metadata(self, *arguments, **named)

    def load_safely(self: DefaultLoadPlanner, item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, weights_only=True)
        except Exception as error:  # as above
            raise UserError(_refused(item.storage_index.fqn, error)) from None
        value.seek(0)
        load_bytes(self, item, value)

    FileSystemReader.read_metadata = read_safely  # type: ignore[method-assign]
    DefaultLoadPlanner.load_bytes = load_safely  # type: ignore[method-assign,assignment]
    try:
        yield
    except CheckpointException as error:  # torch's, in which it wraps what its readers raise, on any rank
        refusals += [failure for failure, _ in error.failures.values() if isinstance(failure, UserError)]
        raise refusals[0] if refusals else error from None
    finally:
        FileSystemReader.read_metadata = read_metadata  # type: ignore[method-assign]
        DefaultLoadPlanner.load_bytes = load_bytes  # type: ignore[method-assign]
        if forced is not None:
            os.environ[FORCED] = forced


def _refused(what: object, error: object) -> str:
    reason = " ".join(str(error).split())[:200]
    return (
        f"{what}: cannot be loaded safely ({reason}); if you know who wrote it, --trust loads it as it is, and "
        "runs what it holds"
    )
