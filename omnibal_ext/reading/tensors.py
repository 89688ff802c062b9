"""The header of a safetensors file: type, shape and position of every tensor, checked against the file's size.

A file has the header's length (8 bytes), the header in JSON {name: {dtype, shape, data_offsets}}, and the tensors.
"""

import math
from dataclasses import dataclass
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import anything, integer, listing, mapping, one_of, record, text
from omnibal_ext.reading.document import decode
from omnibal_ext.reading.files import PathLike, open_plain, size_of

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
"""Bytes of one number, by safetensors' dtype."""
MOST_HEADER = 2**24
"""Bytes: of more than 100,000 tensors; the format allows 100 MB, which take twenty seconds to read."""
REMEDY = "download it again"

_HEADER = mapping(anything)
_METADATA = mapping(text)
_TENSOR = record(
    {
        "dtype": one_of(*ITEM_BYTES),
        "shape": listing(integer(0, 2**48), most=8),
        "data_offsets": listing(integer(), 2, 2),
    }
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file: safetensors' dtype, shape, and first byte, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        """The byte behind its last, counted from the end of the header."""
        return self.start + math.prod(self.shape) * ITEM_BYTES[self.dtype]


def read_tensor_entries(path: PathLike) -> dict[str, TensorEntry]:
    """Return the entries of a safetensors file's header by tensor name, without reading tensors.

    Raises UserError naming the file and the tensor unless the tensors fill the file without gap or overlap.
    """
    with open_plain(path, REMEDY) as file:
        size = size_of(file)
        length = int.from_bytes(file.read(8), "little")
        try:
            if size < 8 or length > min(size - 8, MOST_HEADER):
                raise UserError(f"is no safetensors file ({size} bytes, a header of {length})")
            header: dict[str, Any] = _HEADER("the header", decode(file.read(length)))
            _METADATA("__metadata__", header.pop("__metadata__", {}))
            entries = {name: _entry(name, entry) for name, entry in header.items()}
            _check_filled(entries, size - 8 - length)
        except UserError as error:
            raise UserError(f"{path}: {error}; {REMEDY}") from None
    return entries


def _entry(name: str, entry: Any) -> TensorEntry:
    fields = _TENSOR(name, entry)
    start, end = fields["data_offsets"]
    found = TensorEntry(fields["dtype"], tuple(fields["shape"]), start)
    if found.end != end:
        raise UserError(f"{name}: bytes {start} to {end} are not those of {found.dtype} {list(found.shape)}")
    return found


def _check_filled(entries: dict[str, TensorEntry], size: int) -> None:
    position = 0
    for name, found in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if found.start != position:
            raise UserError(f"{name} starts at byte {found.start}, the tensor before it ends at {position}")
        position = found.end
    if position != size:
        raise UserError(f"has {size} bytes of tensors where its header asks for {position}")
