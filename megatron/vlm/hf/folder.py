"""Folders of safetensors files, read and written a tensor at a time.

A file: the header's length in eight bytes, a JSON header {name: {dtype, shape, data_offsets}}, the tensors' bytes.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from omnibal_ext.architectures.folder import INDEX, weight_files
from omnibal_ext.errors import UserError
from omnibal_ext.files.records import write_text
from omnibal_ext.files.writing import replacing
from omnibal_ext.reading.tensors import read_tensor_entries

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A stored weight: its file, data type and shape."""

    file: str
    dtype: str  # safetensors' name
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size on disk in bytes."""
        return torch.Size(self.shape).numel() * DTYPES[self.dtype].itemsize


class WeightFolder:
    """Weights of a Hugging Face folder or of one file, by name; only headers are read until a tensor is asked for.

    Raises UserError if the folder has no safetensors weights, or one of its files is damaged.
    """

    absent: dict[str, str]
    """Weights that are in the index and in no file -> the file that the index names. A model may need none of them."""

    def __init__(self, path: Path) -> None:
        self.folder = folder = path if path.is_dir() else path.parent
        names = weight_files(path) if path.is_dir() else dict.fromkeys(stored_weights(path), path.name)
        if not names:
            raise UserError(f"{folder}: no model.safetensors and no {INDEX} here; other weight formats are not read")
        self.stored: dict[str, Stored] = {}
        for file in dict.fromkeys(names.values()):
            self.stored |= stored_weights(folder / file) if (folder / file).exists() else {}
        self.absent = {name: file for name, file in names.items() if name not in self.stored}

    def tensor(self, name: str) -> Tensor:
        """Read one weight."""
        with safe_open(self.folder / self.stored[name].file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def stored_weights(path: Path) -> dict[str, Stored]:
    """Read the header of one safetensors file: its weights. Raises UserError naming the file and the weight."""
    return {name: Stored(path.name, entry.dtype, entry.shape) for name, entry in read_tensor_entries(path).items()}


def write_weights(path: Path, stored: Mapping[str, Stored], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write one safetensors file; `tensors` may come in any order, each is written at its offset."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, entry in stored.items():
        header[name] = {
            "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [position, position + entry.bytes]
        }  # fmt: skip
        position += entry.bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight
    with replacing(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
        for name, tensor in tensors:
            file.seek(8 + len(text) + header[name]["data_offsets"][0])
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def write_index(folder: Path, stored: Mapping[str, Stored]) -> None:
    """Write the index of weights in several files, name -> file; a single file needs none."""
    if len({entry.file for entry in stored.values()}) > 1:
        index = {
            "metadata": {"total_size": sum(entry.bytes for entry in stored.values())},
            "weight_map": {name: entry.file for name, entry in sorted(stored.items())},
        }
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
