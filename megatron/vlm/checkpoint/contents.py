"""What a save's table of contents (`.metadata`) consists of: the classes it names, their fields, what each may hold.

A name in the file is never the class itself: it becomes a `Name`, which knows how to make an instance or a value. All
names, and the members of enumerations, are looked up when this module is imported, so that no file can change what they
mean.
"""

import functools
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import PosixPath
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata, MCoreSavePlan
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from omnibal_ext.reading.files import is_plain_name

Holds = Callable[[Any], bool]
MOST_PARTS, LONGEST_PATH = 64, 2**12
"""Dimensions of a tensor, or parts of a path; characters of a path."""
LARGEST = 2**63
_is_plain_name = functools.lru_cache(1024)(is_plain_name)


@dataclass(frozen=True)
class Record:
    """A class whose instances a save's table of contents may hold."""

    kind: type
    fields: Mapping[str, Holds]
    """What each of its fields may hold."""
    required: frozenset[str] = frozenset()
    is_state_tuple: bool = False
    """Whether its state is the tuple of its fields, which its own `__setstate__` takes."""

    def fill(self, instance: Any, state: Any) -> None:
        """Set the fields of an empty instance. Raises UnpicklingError for a state that its class does not have."""
        named = state
        if self.is_state_tuple:
            is_whole = type(state) is tuple and len(state) == len(self.fields)
            named = dict(zip(self.fields, state, strict=True)) if is_whole else None
        if type(named) is not dict or vars(instance) or not self.required <= named.keys():
            raise pickle.UnpicklingError(f"a {self.kind.__name__} has not the fields of one")
        for name, value in named.items():
            holds = self.fields.get(name)
            if holds is None or not holds(value):
                raise pickle.UnpicklingError(f"a {self.kind.__name__} has a field {name!r} that cannot be what it is")
        if self.is_state_tuple:
            instance.__setstate__(state)
        else:
            vars(instance).update(named)


@dataclass(frozen=True, slots=True)
class Name:
    """What the unpickler has in place of a class or function that a file names: how to make an instance or a value."""

    record: Record | None = None
    call: Callable[..., Any] | None = None
    members: Mapping[str, Any] | None = None
    """Members of an enumeration, by name."""


def _is(*kinds: type) -> Holds:
    return lambda value: type(value) in kinds


def _maybe(holds: Holds) -> Holds:
    return lambda value: value is None or holds(value)


def _listing(*kinds: type) -> Holds:
    return lambda value: type(value) in (list, tuple) and all(type(one) in kinds for one in value)


def _mapping(key: type, holds: Holds) -> Holds:
    return lambda value: (
        type(value) in (dict, OrderedDict)
        and all(type(one) is key for one in value)
        and all(holds(one) for one in value.values())
    )


def _file_name(value: Any) -> bool:
    return type(value) is str and _is_plain_name(value)


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value < LARGEST


def _refuse(what: str) -> None:
    raise pickle.UnpicklingError(what)


def _size(numbers: Any) -> torch.Size:
    if type(numbers) is not tuple or len(numbers) > MOST_PARTS or not all(map(_count, numbers)):
        _refuse("a size is not one of a tensor")
    return torch.Size(numbers)


def _path(*parts: Any) -> PosixPath:
    if len(parts) > MOST_PARTS or not all(type(part) is str and len(part) <= LONGEST_PATH for part in parts):
        _refuse("a path is not one of a folder")
    return PosixPath(*parts)


def _ordered() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _layout(name: Any) -> torch.layout:
    if type(name) is not str or name not in _LAYOUTS:
        _refuse("a layout is not one of torch's")
    return _LAYOUTS[name]


def _member(kind: Any, name: Any) -> Any:
    """Return a member of an enumeration, which Python before 3.11.4 pickles by getattr: it is given nothing else."""
    if type(kind) is not Name or not kind.members or type(name) is not str or name not in kind.members:
        _refuse("it names builtins.getattr, which no checkpoint needs of anything but enumerations")
    return kind.members[name]


def _enumeration(kind: type[Enum]) -> Name:
    values = {member.value: member for member in kind}

    def call(value: Any) -> Any:
        if type(value) is not int or value not in values:
            _refuse(f"a {kind.__name__} is none of its members")
        return values[value]

    return Name(call=call, members={member.name: member for member in kind})


_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_TORCH = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype | torch.layout)}
_text, _maybe_text = _is(str), _maybe(_is(str))
_size_of, _planned = _is(torch.Size), _maybe(_mapping(str, _listing(str, int)))
_CHUNK, _TENSOR, _INDEX = metadata.ChunkStorageMetadata, metadata.TensorStorageMetadata, metadata.MetadataIndex
_PROPERTIES, _BYTES, _META = metadata.TensorProperties, metadata.BytesStorageMetadata, metadata.StorageMeta
_PLAN: dict[str, Holds] = {
    "items": _listing(WriteItem), "storage_data": _is(type(None)), "planner_data": _planned, "usable": _is(bool),
}  # fmt: skip
_MCORE = {"mcore_data": _maybe(_mapping(str, _mapping(str, _listing(int))))}
"""What Megatron has added to torch's classes."""
_TABLE: dict[str, Holds] = {
    "state_dict_metadata": _mapping(str, _is(_TENSOR, _BYTES)), "planner_data": _planned,
    "storage_data": _mapping(_INDEX, _is(_StorageInfo)), "storage_meta": _maybe(_is(_META)), "version": _maybe_text,
    "all_local_plans": _listing(SavePlan, MCoreSavePlan), **_MCORE,
}  # fmt: skip
_MADE = (
    Record(_CHUNK, {"offsets": _size_of, "sizes": _size_of}, frozenset({"offsets", "sizes"})),
    Record(_TENSOR, {"properties": _is(_PROPERTIES), "size": _size_of, "chunks": _listing(_CHUNK)},
           frozenset({"properties", "size", "chunks"})),
    Record(_PROPERTIES, {
        "dtype": _is(torch.dtype), "layout": _is(torch.layout), "requires_grad": _is(bool),
        "memory_format": _is(metadata._MEM_FORMAT_ENCODING), "pin_memory": _is(bool),
    }, frozenset({"dtype"}), is_state_tuple=True),
    Record(_BYTES, {}),
    Record(_INDEX, {"fqn": _text, "offset": _maybe(_size_of), "index": _maybe(_count)}, frozenset({"fqn"})),
    Record(_META, {"checkpoint_id": _maybe(_is(str, PosixPath)), "save_id": _maybe_text, "load_id": _maybe_text,
                   "modules": _listing(str)}, frozenset({"checkpoint_id"})),
    Record(_StorageInfo, {"relative_path": _file_name, "offset": _count, "length": _count,
                          "transform_descriptors": _maybe(_listing(str))},
           frozenset({"relative_path", "offset", "length"})),
    Record(TensorWriteData, {"chunk": _is(_CHUNK), "properties": _is(_PROPERTIES), "size": _size_of},
           frozenset({"chunk", "properties", "size"})),
    Record(WriteItem, {"index": _is(_INDEX), "type": _is(WriteItemType), "bytes_io_data": _is(type(None)),
                       "tensor_data": _maybe(_is(TensorWriteData))}, frozenset({"index", "type"})),
    Record(SavePlan, _PLAN, frozenset({"items"})),
    Record(MCoreSavePlan, {**_PLAN, **_MCORE}, frozenset({"items"})),
    Record(metadata.Metadata, _TABLE, frozenset({"state_dict_metadata"})),
    Record(MCoreMetadata, _TABLE, frozenset({"state_dict_metadata"})),
)  # fmt: skip
RECORDS: dict[type, Record] = {record.kind: record for record in _MADE}
NAMES: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): Name(record) for kind, record in RECORDS.items()},
    **{(kind.__module__, kind.__name__): _enumeration(kind) for kind in (WriteItemType, metadata._MEM_FORMAT_ENCODING)},
    **{("torch", name): value for name, value in _TORCH.items()},
    ("torch", "Size"): Name(call=_size),
    ("torch.serialization", "_get_layout"): Name(call=_layout),
    ("builtins", "getattr"): Name(call=_member),
    ("collections", "OrderedDict"): Name(call=_ordered),
    ("pathlib", "PosixPath"): Name(call=_path),
    ("pathlib._local", "PosixPath"): Name(call=_path),  # Python 3.13
}
"""All that a table may name; torch's dtypes and layouts are values as they are."""
TABLES = (metadata.Metadata, MCoreMetadata)
SHARED = frozenset({
    str, int, bool, type(None), torch.Size, torch.dtype, torch.layout, WriteItemType, metadata._MEM_FORMAT_ENCODING,
    PosixPath, Name, _CHUNK, _INDEX, _PROPERTIES, _BYTES, TensorWriteData, WriteItem,
})  # fmt: skip
"""What a table may refer to twice: nothing that grows. All else is a tree, no larger than the file that holds it."""
