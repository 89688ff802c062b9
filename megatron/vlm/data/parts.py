"""The unit of work of preprocessing: a part is a few hundred lines of an input file, prepared and saved as one file.

A part's bytes depend on its lines and the recipe alone, and a part file appears whole or not at all. So it does not
matter which process makes it, in which order, or how often a run was killed before: existing parts are kept, missing
ones are made.
"""

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.vlm.data.chat import Rejected
from megatron.vlm.data.samples import Recipe, Sample, SampleMaker, open_recipe
from omnibal_ext.errors import UserError

LINES_PER_PART = 500


@dataclass(frozen=True, slots=True)
class PartSource:
    """Where a part's lines are: `size` bytes of `file` from `offset`; `first_line` counts from 1."""

    file: Path
    offset: int
    size: int
    first_line: int
    lines: int


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file as it was read: its hash, its lines, and the parts it is cut into."""

    path: Path
    sha256: str
    lines: int
    parts: tuple[PartSource, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A prepared part: all samples end to end. N samples, T tokens, B bytes of image JSON."""

    tokens: NDArray[np.int32]  # [T]
    loss_mask: NDArray[np.uint8]  # [T]
    images: NDArray[np.uint8]  # [B] JSON list of one sample after the other
    token_lengths: NDArray[np.int64]  # [N]
    image_lengths: NDArray[np.int64]  # [N]
    tiles: NDArray[np.int32]  # [N]
    lines: NDArray[np.int64]  # [N] number of the line in the input file
    rejected: NDArray[np.uint8]  # JSON lines

    def save(self, path: Path) -> None:
        """Write the part, whole or not at all."""
        temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
        with temporary.open("wb") as file:
            np.savez(file, **{name: getattr(self, name) for name in self.__slots__})
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> "Part":
        """Read a part back."""
        with np.load(path, allow_pickle=False) as arrays:
            return cls(**{name: arrays[name] for name in cls.__slots__})

    def rejections(self) -> list[dict[str, Any]]:
        """The rejected lines: `file`, `line`, `reason`, `detail`."""
        return [json.loads(line) for line in self.rejected.tobytes().splitlines()]


def read_input(path: Path, lines_per_part: int = LINES_PER_PART) -> InputFile:
    """Cut a file into parts and hash it, in one pass. Raises `UserError` if it cannot be read."""
    digest, parts = hashlib.sha256(), []
    offset = lines = 0
    try:
        with path.open("rb") as file:
            while block := list(islice(file, lines_per_part)):
                size = sum(map(len, block))
                parts.append(PartSource(path, offset, size, first_line=lines + 1, lines=len(block)))
                offset, lines = offset + size, lines + len(block)
                for line in block:
                    digest.update(line)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return InputFile(path, digest.hexdigest(), lines, tuple(parts))


def prepare_part(recipe: Recipe, source: PartSource) -> Part:
    """Make the samples of a part; what cannot be used is rejected with file, line, reason and detail."""
    maker = open_recipe(recipe)
    samples: list[Sample] = []
    lines: list[int] = []
    rejected: list[dict[str, Any]] = []
    for number, line in _lines(source):
        try:
            samples.append(_make(maker, line, source.file, number))
            lines.append(number)
        except Rejected as verdict:
            place = {"file": str(source.file), "line": number}
            rejected.append({**place, "reason": verdict.reason, "detail": verdict.detail})
    return _join(samples, lines, rejected)


def _lines(source: PartSource) -> Iterator[tuple[int, bytes]]:
    """Lines that hold more than white space, numbered as in the file."""
    with source.file.open("rb") as file:
        file.seek(source.offset)
        block = file.read(source.size)
    for number, line in enumerate(block.split(b"\n"), start=source.first_line):
        if line.strip():
            yield number, line


def _make(maker: SampleMaker, line: bytes, file: Path, number: int) -> Sample:
    try:
        return maker.make(line)
    except Rejected:
        raise
    except Exception as error:  # a fault of ours: say at which line, then let it end the run
        error.add_note(f"while preparing {file}, line {number}")
        raise


def _join(samples: Sequence[Sample], lines: Sequence[int], rejected: Sequence[dict[str, Any]]) -> Part:
    images = [json.dumps([asdict(image) for image in sample.images]).encode() for sample in samples]
    return Part(
        tokens=np.concatenate([np.zeros(0, np.int32), *(sample.tokens for sample in samples)]),
        loss_mask=np.concatenate([np.zeros(0, np.uint8), *(sample.loss_mask for sample in samples)]),
        images=np.frombuffer(b"".join(images), dtype=np.uint8),
        token_lengths=np.array([len(sample.tokens) for sample in samples], dtype=np.int64),
        image_lengths=np.array([len(text) for text in images], dtype=np.int64),
        tiles=np.array([sample.tiles for sample in samples], dtype=np.int32),
        lines=np.array(lines, dtype=np.int64),
        rejected=np.frombuffer("".join(json.dumps(row) + "\n" for row in rejected).encode(), dtype=np.uint8),
    )
