"""The only way by which checkpoints are loaded: without --trust none runs code by being loaded.

A save's table of contents is read once, by `unpickling.unpickle`, and what that returned is what is used. Everything
else that torch and Megatron read goes through `torch.load`, which then takes weights only.
"""

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from megatron.vlm.checkpoint.unpickling import unpickle
from omnibal_ext.errors import UserError
from omnibal_ext.output import printable
from omnibal_ext.reading.files import read_bytes

CONTENTS = ".metadata"
LARGEST_CONTENTS = 2**30
"""Bytes, for some three million shards."""


def read_contents(path: Path) -> Metadata:
    """Read a save's .metadata. Raises UserError if it is damaged or names another class."""
    data = read_bytes(path, "is it a distributed checkpoint?", LARGEST_CONTENTS)
    try:
        return unpickle(data)
    except Exception as error:  # a damaged pickle raises nearly anything
        raise UserError(_refused(path, error)) from None


class SaveReader(FileSystemReader):
    """Reads one save for `read_weight`, its table of contents once: safely, or with `trust` as torch does."""

    def __init__(self, folder: Path, trust: bool = False) -> None:
        super().__init__(folder)
        self.contents = super().read_metadata() if trust else read_contents(folder / CONTENTS)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the table of contents."""
        return self.contents


def read_weight(reader: SaveReader, name: str, entry: TensorStorageMetadata) -> Tensor:
    """Read one weight of a save, unsharded; torch reads tensors as weights only."""
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state[name]


@contextmanager
def safe_unpickling(trust: bool) -> Iterator[None]:
    """Make a context in which torch's and Megatron's readers of checkpoints run no code, whatever the environment says.

    With `trust` they run anything. Raises UserError for a refused file.
    """
    _forget_contents()
    if trust:
        yield
        return
    read_metadata, load_bytes, load = FileSystemReader.read_metadata, DefaultLoadPlanner.load_bytes, torch.load
    refusals: list[UserError] = []
    FileSystemReader.read_metadata = _read_once(refusals)  # type: ignore[method-assign]
    DefaultLoadPlanner.load_bytes = _named_by_item(load_bytes)  # type: ignore[method-assign]
    torch.load = _weights_only(load)
    try:
        yield
        if refusals:  # where torch went on with tables of single ranks
            raise refusals[0]
    except CheckpointException as error:  # torch's, in which it wraps what its readers raise, on any rank
        refused = [refusal for failure, _ in error.failures.values() if (refusal := _refusal(failure))]
        raise next(iter(refusals + refused), error) from None
    except pickle.UnpicklingError as error:  # of a file that Megatron reads itself
        raise _refusal(error) from None  # type: ignore[misc]
    finally:
        FileSystemReader.read_metadata = read_metadata  # type: ignore[method-assign]
        DefaultLoadPlanner.load_bytes = load_bytes  # type: ignore[method-assign]
        torch.load = load
        _forget_contents()


def _forget_contents() -> None:
    """Empty the caches of Megatron's readers, in which tables of trusted and of other loads would lie together."""
    kinds = [FileSystemReader]
    for kind in kinds:
        kinds += kind.__subclasses__()
        if hasattr(kind, "clear_metadata_cache"):
            kind.clear_metadata_cache()


def _read_once(refusals: list[UserError]) -> Callable[..., Metadata]:
    """Return FileSystemReader.read_metadata for one load: all readers of a save get what the first one read.

    Errors of refused tables are added to `refusals`: torch hides them behind errors of its own.
    """
    read: dict[Path, Metadata] = {}

    def read_safely(self: FileSystemReader, *_: Any, rank: int | None = None, **__: Any) -> Metadata:
        path = Path(self.path) / (CONTENTS if rank is None else f"__{rank}{CONTENTS}")
        try:
            if path not in read:
                read[path] = read_contents(path)
        except UserError as refusal:
            refusals.append(refusal)
            raise
        contents = read[path]
        contents.storage_meta = contents.storage_meta or StorageMeta()
        contents.storage_meta.load_id = self.load_id
        return contents

    return read_safely


def _named_by_item(load_bytes: Callable[..., None]) -> Callable[..., None]:
    """Wrap DefaultLoadPlanner.load_bytes, so that its error names what it cannot load."""

    def load_named(self: DefaultLoadPlanner, item: ReadItem, value: io.BytesIO) -> None:
        try:
            load_bytes(self, item, value)
        except Exception as error:  # as above
            raise UserError(_refused(item.storage_index.fqn, error)) from None

    return load_named


def _weights_only(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch.load, which then takes weights only, whatever its caller or the environment says.

    Raises UnpicklingError for what it refuses and for damaged files.
    """

    def load_weights(*arguments: Any, **named: Any) -> Any:
        try:
            return load(*arguments, **{**named, "weights_only": True})
        except OSError:
            raise
        except Exception as error:  # as above
            said = str(error).rpartition("WeightsUnpickler error: ")[2]  # torch's advice in front of it is long
            raise pickle.UnpicklingError(said) from None

    return load_weights


def _refusal(error: BaseException) -> UserError | None:
    if isinstance(error, UserError):
        return error
    return UserError(_refused("the checkpoint", error)) if isinstance(error, pickle.UnpicklingError) else None


def _refused(what: object, error: object) -> str:
    reason = printable(" ".join(str(error).split()))[:200]
    return (
        f"{printable(str(what))[:200]}: cannot be loaded safely ({reason}); if you know who wrote it, training with "
        "--trust loads it as it is, and runs what it holds"
    )
