"""The unit of work of preprocessing: a part is a few hundred rows of an input file, prepared and saved as one file.

A part's bytes depend on its rows and the recipe only, and its file is renamed when complete. So any process may make
it, in any order, and a killed run continues with the missing parts.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.vlm.data.formats.rows import PartSource, Row
from megatron.vlm.preprocessing.inputs import FORMATS
from megatron.vlm.preprocessing.recipe import Recipe
from megatron.vlm.preprocessing.samples import Sample, SampleMaker, open_recipe
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.files.writing import replacing
from omnibal_ext.modalities.modality import FURTHER, FURTHER_SIZES, VISION
from omnibal_ext.preprocess_flags import SHORTENINGS
from omnibal_ext.reading.arrays import read_arrays
from omnibal_ext.reading.stores import raise_if_lost


@dataclass(frozen=True, slots=True)
class PreparedPart:
    """The samples of a part, concatenated: N samples, T stored tokens, B bytes of their media's JSON."""

    tokens: NDArray[np.int32]  # [T] one image token for each run
    loss_mask: NDArray[np.uint8]  # [T]
    media: NDArray[np.uint8]  # [B] a JSON object for each sample
    token_lengths: NDArray[np.int64]  # [N]
    media_lengths: NDArray[np.int64]  # [N]
    tiles: NDArray[np.int32]  # [N]
    further: NDArray[np.int64]  # [sizes, N] units of each of `FURTHER_SIZES`, such as mel frames of all sounds
    lengths: NDArray[np.int64]  # [N] tokens that the language model reads
    supervised: NDArray[np.int64]  # [N] tokens that are to be predicted
    shortened: NDArray[np.uint8]  # [N] 0, or 1 + the index in `SHORTENINGS`
    videos: NDArray[np.int64]  # [N] video files
    lines: NDArray[np.int64]  # [N] number of the line in the input file
    rejected: NDArray[np.uint8]  # JSON lines

    def save(self, path: Path) -> None:
        """Write the part to a temporary file and rename it."""
        with replacing(path) as file:
            np.savez(file, of=_where(path), **{name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def load(cls, path: Path) -> "PreparedPart":
        """Read a part. Raises UserError if it is damaged, or another part's."""
        remedy = "remove it"
        of, *columns = read_arrays(path, ("of", *cls.__slots__), remedy)
        if of.tolist() != _where(path):
            raise UserError(f"{path}: is another part; {remedy}")
        part = cls(*columns)
        lengths = (part.token_lengths, part.media_lengths)
        numbers: tuple[NDArray[Any], ...] = (*lengths, part.tiles, part.further.T, part.lines)
        counts = set(map(len, numbers))
        stored: tuple[NDArray[Any], ...] = (part.tokens, part.media)
        unlike = any(each.sum() != len(column) for each, column in zip(lengths, stored, strict=True))
        unlike |= part.further.shape[:-1] != (len(FURTHER_SIZES),)
        if len(counts) != 1 or unlike or len(part.tokens) != len(part.loss_mask):
            raise UserError(f"{path}: its columns do not go together; {remedy}")
        return part

    def column(self, name: str) -> NDArray[Any]:
        """Return a number for each sample, [N]: a field, or the units of one of `FURTHER_SIZES`, such as mel frames."""
        found: NDArray[Any] = self.further[FURTHER_SIZES.index(name)] if name in FURTHER_SIZES else getattr(self, name)
        return found

    def rejections(self) -> list[dict[str, Any]]:
        """List the rejected lines: `file`, `line`, `reason`, `detail`."""
        return [json.loads(line) for line in self.rejected.tobytes().splitlines()]


def _where(path: Path) -> str:
    """Return the hash of the job and the number of a part, as its file is called."""
    return f"{path.parent.name}/{path.name}"


def prepare_part(recipe: Recipe, source: PartSource) -> PreparedPart:
    """Make the samples of a part; unusable rows are rejected with file, line, reason and detail."""
    maker = open_recipe(recipe)
    samples: list[Sample] = []
    lines: list[int] = []
    rejected: list[dict[str, Any]] = []
    for row in FORMATS[source.format].rows(source):
        try:
            samples.append(_make(maker, row, source))
            lines.append(row.number)
        except Rejected as verdict:
            raise_if_lost()
            where = {"file": str(source.file), "line": row.number}
            rejected.append({**where, "reason": verdict.reason, "detail": verdict.detail})
    return _join(samples, lines, rejected)


def _make(maker: SampleMaker, row: Row, source: PartSource) -> Sample:
    try:
        return maker.make(row, source)
    except Rejected:
        raise
    except Exception as error:  # our fault: add the row to the traceback
        error.add_note(f"while preparing {source.file}, line {row.number}")
        raise


def _join(samples: Sequence[Sample], lines: Sequence[int], rejected: Sequence[dict[str, Any]]) -> PreparedPart:
    media = [
        json.dumps({one.inputs: [*map(asdict, items)] for one, items in sample.items.items() if items}).encode()
        for sample in samples
    ]
    return PreparedPart(
        tokens=np.concatenate([np.zeros(0, np.int32), *(sample.tokens for sample in samples)]),
        loss_mask=np.concatenate([np.zeros(0, np.uint8), *(sample.loss_mask for sample in samples)]),
        media=np.frombuffer(b"".join(media), dtype=np.uint8),
        token_lengths=np.array([len(sample.tokens) for sample in samples], dtype=np.int64),
        media_lengths=np.array([len(text) for text in media], dtype=np.int64),
        tiles=np.array([sample.units(VISION) for sample in samples], dtype=np.int32),
        further=np.array([[sample.units(one) for sample in samples] for one in FURTHER], dtype=np.int64),
        lengths=np.array([sample.length for sample in samples], dtype=np.int64),
        supervised=np.array([sample.loss_mask[1:].sum() for sample in samples], dtype=np.int64),
        shortened=np.array([1 + SHORTENINGS.index(s.shortened) if s.shortened else 0 for s in samples], dtype=np.uint8),
        videos=np.array([sample.video_files for sample in samples], dtype=np.int64),
        lines=np.array(lines, dtype=np.int64),
        rejected=np.frombuffer("".join(json.dumps(row) + "\n" for row in rejected).encode(), dtype=np.uint8),
    )
