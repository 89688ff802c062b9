"""The last step of preprocessing: join all parts of a job, in order, into a dataset folder, renamed when complete."""

import os
import shutil
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron.vlm.data.columns import COLUMNS
from megatron.vlm.data.manifest import SCHEMA_VERSION
from megatron.vlm.data.media.videos import READING
from megatron.vlm.data.rejects import RejectCount, reject_limit
from megatron.vlm.preprocessing.job import PreprocessJob
from megatron.vlm.preprocessing.parts import PreparedPart, prepare_part
from megatron.vlm.preprocessing.recipe import Recipe
from megatron.vlm.preprocessing.samples import open_recipe
from omnibal_ext.errors import UserError
from omnibal_ext.families.registry import TEMPLATES
from omnibal_ext.files.records import checksums_of, write_record
from omnibal_ext.files.writing import replacing
from omnibal_ext.launch.apart import apart
from omnibal_ext.modalities.modality import FURTHER_SIZES
from omnibal_ext.output import say
from omnibal_ext.preprocess_flags import SHORTENINGS
from omnibal_ext.reading.document import sealed
from omnibal_ext.sizes import Sizes

if TYPE_CHECKING:
    from megatron.vlm.data.indexed_columns import ColumnWriter

OF_SAMPLES = ("tiles", "lengths", "lines", "supervised")
"""Arrays of a part with a number for each sample, which sizes.npz keeps."""


def of_samples(recipe: Recipe) -> tuple[str, ...]:
    """Return the names of a part's arrays with a number for each sample: `OF_SAMPLES`, and sizes such as mel frames."""
    return (*OF_SAMPLES, *(one.size for one in recipe.rules))


def take_sizes(columns: dict[str, NDArray[Any]]) -> Sizes:
    """Remove the sizes from a part's arrays (`of_samples`), and return them."""
    more: dict[str, Any] = {size: columns.pop(size) for size in FURTHER_SIZES if size in columns}
    return Sizes.from_arrays(columns.pop("tiles"), columns.pop("lengths"), **more)


@dataclass(slots=True)
class _Joined:
    """What merging collects of all parts: sizes of samples, counts, input files, rejects."""

    columns: dict[str, list[NDArray[Any]]]
    """Name `of_samples` -> each part's array."""
    video_files: int = 0
    shortened: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(SHORTENINGS), np.int64))
    sources: list[dict[str, Any]] = field(default_factory=list)
    rejects: RejectCount = field(default_factory=RejectCount)


def merge(job: PreprocessJob, max_rejects: int | None = None) -> dict[str, Any]:
    """Join the parts into the dataset folder and return its manifest.

    Raises `UserError`, and keeps the parts, if more lines than `reject_limit` were rejected, or all.
    """
    for unfinished in job.work.glob("dataset.*"):  # whoever merges holds the lock of the output
        shutil.rmtree(unfinished, ignore_errors=True)
    folder = job.work / "dataset.unfinished"
    folder.mkdir()
    joined = _join_parts(job, folder)
    rejected = folder / "rejected.jsonl"
    if not any(source["samples"] for source in joined.sources):
        listed = f"; all are in {rejected}" * bool(joined.rejects.total)
        raise UserError(f"no line of the input can be used: {joined.rejects.describe()}{listed}")
    joined.rejects.check(reject_limit(job.lines, max_rejects), job.lines, rejected)
    columns = {name: np.concatenate(arrays) for name, arrays in joined.columns.items()}
    sizes = take_sizes(columns)
    sizes.save(folder / "sizes.npz", **columns)
    checksums = checksums_of(folder, sorted(path.name for path in folder.iterdir()))
    manifest = sealed({**_manifest(job, sizes, joined), "checksums": checksums})
    write_record(folder / "manifest.json", manifest)
    folder.rename(os.path.realpath(job.output))
    job.tidy()
    return manifest


def ready_part(job: PreprocessJob, number: int) -> PreparedPart:
    """Read part `number` of a job; if its file is damaged, or another part's, make the part again."""
    try:
        return PreparedPart.load(job.part_path(number))
    except UserError as error:
        say(f"{error}: it is made again", error=True)
    source = job.sources[number]
    return apart(prepare_part, (job.recipe, source), source.lines_named)


def _join_parts(job: PreprocessJob, folder: Path) -> _Joined:
    """Append every part to the columns and rejects of `folder`; count the samples of each input file."""
    from megatron.vlm.data.indexed_columns import ColumnWriter  # with core, which `omnibal look` goes without

    writers = {name: ColumnWriter(folder, name) for name in COLUMNS}
    joined = _Joined({name: [] for name in of_samples(job.recipe)})
    parts = (ready_part(job, number) for number in range(len(job.sources)))
    with replacing(folder / "rejected.jsonl") as rejected:
        for file in job.inputs:
            samples, rejected_before = 0, joined.rejects.total
            for part in islice(parts, len(file.parts)):
                _append(part, writers, joined)
                rejected.write(part.rejected.tobytes())
                samples += len(part.tiles)
            rejects = joined.rejects.total - rejected_before
            joined.sources.append(
                {
                    "file": str(file.path),
                    "samples": samples,
                    "rejected": rejects,
                    "weight": file.weight,
                    "path": str(file.path.resolve()),
                    "image_root": file.root and str(file.root.resolve()),
                }
            )
    for writer in writers.values():
        writer.close()
    return joined


def _append(part: PreparedPart, writers: "dict[str, ColumnWriter]", joined: _Joined) -> None:
    writers["tokens"].append(part.tokens, part.token_lengths)
    writers["loss_mask"].append(part.loss_mask, part.token_lengths)
    writers["media"].append(part.media, part.media_lengths)
    for name, arrays in joined.columns.items():
        arrays.append(part.column(name))
    joined.shortened += np.bincount(part.shortened, minlength=1 + len(SHORTENINGS))[1:]
    joined.video_files += int(part.videos.sum())
    joined.rejects.add(part.rejections())


def _manifest(job: PreprocessJob, sizes: Sizes, joined: _Joined) -> dict[str, Any]:
    recipe, maker = job.recipe, open_recipe(job.recipe)
    tokenizer, digest = maker.tokenizer, job.identity["recipe"]["tokenizer"]
    vocabulary = {"size": tokenizer.vocabulary_size, "sha256": tokenizer.vocabulary_hash()}
    further: dict[str, Any] = {}
    for one, rule in recipe.rules.items():
        further |= {f"{one.name}_token_id": maker.further_tokens[one], one.name: asdict(rule)}
    return {
        "schema_version": SCHEMA_VERSION,
        "samples": len(sizes),
        "rejected": joined.rejects.total,
        "rejected_by_reason": dict(sorted(joined.rejects.by_reason.items())),
        "shortened": {method: int(count) for method, count in zip(SHORTENINGS, joined.shortened, strict=True) if count},
        "sources": joined.sources,
        "tiles": int(sizes.tiles.sum()),
        "tokens": int(sizes.tokens.sum()),
        "image_root": recipe.image_root and str(recipe.image_root.resolve()),
        "tokenizer": {
            "path": str(recipe.tokenizer.resolve()),
            "sha256": digest,
            "type": tokenizer.kind,
            "vocabulary": vocabulary,
        },
        "vocab_size": tokenizer.vocab_size,
        "special_tokens": maker.special_tokens,
        "image_markup": recipe.markup,
        "image_token_id": maker.image_token_id,
        "video_token_id": maker.video_token_id,
        "video_files": joined.video_files,
        "video_reading": READING,
        **further,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.token_id(maker.template.end_of_turn),
        "chat_template": recipe.template if recipe.template in TEMPLATES else str(Path(recipe.template).resolve()),
        "chat_program": maker.template.digest,
        "tile_size": recipe.tiling.tile_size,
        "tokens_per_tile": recipe.tokens_per_tile,
        "tiling": asdict(recipe.tiling),
        "normalization": recipe.normalization,
        "made_from": job.identity,
    }
