"""Preprocessing from end to end: input files -> parts, by several processes -> one dataset folder.

1. Cut the inputs into parts and hash them (`job`).
2. Prepare every missing part (`parts`), here or in the shards of a Slurm array.
3. Join the parts in order into a dataset folder, renamed when complete (`merge`).

A job locks its output folder from the first check to the end; a second one waits. Killed at any moment and started
again, it continues and ends with the same bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.formats.rows import ROWS_PER_PART, PartSource
from megatron.vlm.data.moved import note_moved, sources_now, where_is
from megatron.vlm.data.rejects import RejectCount, reject_limit
from megatron.vlm.data.sources import Sources
from megatron.vlm.preprocessing.inputs import read_inputs
from megatron.vlm.preprocessing.job import PreprocessJob, Shard
from megatron.vlm.preprocessing.merge import merge, of_samples, ready_part, take_sizes
from megatron.vlm.preprocessing.parts import prepare_part
from megatron.vlm.preprocessing.recipe import Recipe
from megatron.vlm.preprocessing.samples import open_recipe
from omnibal_ext.console import track
from omnibal_ext.errors import UserError
from omnibal_ext.files.locks import working_on
from omnibal_ext.files.writing import remove_unfinished, replacing
from omnibal_ext.launch.apart import each_apart
from omnibal_ext.packing.corpus import Corpus, CorpusSource

Value = TypeVar("Value")
_Measured = tuple[dict[str, NDArray[Any]], list[dict[str, Any]]]
"""Columns `of_samples` of a part, and its rejections."""


def preprocess(job: PreprocessJob, workers: int = 1, max_rejects: int | None = None) -> dict[str, Any]:
    """Write the job's dataset folder and return its manifest. A complete folder of the job stays; with
    `decode_images` its images are checked again.

    Raises `UserError` if the output folder holds something else, more lines than `reject_limit` are rejected, or images
    of a complete folder have changed.
    """
    with working_on(job.output):
        if (done := _finished(job, max_rejects)) is not None:
            if job.recipe.decode_images:
                check_images(ChatDataset(job.output, job.recipe.image_checksums), workers)
            return done
        _prepare(job, Shard(), workers, max_rejects)
        return merge(job, max_rejects)


def preview(job: PreprocessJob, max_rejects: int | None = None) -> str:
    """Prepare the first part of every input file and summarise it in a line; nothing is written.

    Raises UserError if most of these lines are rejected, and more than the limit.
    """
    rejects, seen = RejectCount(), 0
    for number, rejections in _each_part(
        _preview_one, [(job.recipe, file.parts[0]) for file in job.inputs if file.parts], 1
    ):
        rejects.add(rejections)
        seen += number
    if rejects.total > seen // 2:
        rejects.check(min(reject_limit(job.lines, max_rejects), seen // 2), seen)
    files = f"{len(job.inputs)} file{'s' * (len(job.inputs) > 1)} of {job.lines} lines"
    return f"{files}; of the first {seen} {rejects.total} rejected" + (f": {rejects.describe()}" * bool(rejects.total))


def measure(
    inputs: Sequence[Path], recipe: Recipe, workers: int = 1, max_rejects: int | None = None
) -> tuple[Corpus, RejectCount]:
    """Return the corpus that a dataset of these inputs would be, without making it, and the lines that it would reject.

    Raises `UserError` if an input cannot be read, no line can be used, or more than `reject_limit` could not.
    """
    open_recipe(recipe)  # a bad tokenizer must fail here, not in every worker
    files = read_inputs(inputs, image_root=recipe.image_root)
    tasks = [(recipe, source, number) for number, source in enumerate(one for file in files for one in file.parts)]
    measured = dict(track(_each_part(_measure_one, tasks, workers), "measure", total=len(tasks)))
    parts = [measured[number] for number in range(len(tasks))]
    rejects = RejectCount()
    for _, rejections in parts:
        rejects.add(rejections)
    lines = sum(file.lines for file in files)
    rejects.check(reject_limit(lines, max_rejects), lines, whole=True)
    columns = {name: np.concatenate([part[name] for part, _ in parts]) for name in of_samples(recipe)} if parts else {}
    if not len(columns.get("lines", ())):
        raise UserError(f"no line of the input can be used: {rejects.describe()}")
    samples = iter([len(part["lines"]) for part, _ in parts])
    sources = (CorpusSource(str(file.path), sum(islice(samples, len(file.parts))), file.weight) for file in files)
    sizes = take_sizes(columns)
    return Corpus(sizes, tuple(sources), lines=columns["lines"], supervised=columns["supervised"]), rejects


def check_images(data: ChatDataset, workers: int = 1) -> None:
    """Decode all images and sounds of a dataset and compare recorded CRC-32s.

    Raises UserError naming the first damaged one.
    """
    starts = range(0, len(data), ROWS_PER_PART)
    tasks = [(data, range(start, min(start + ROWS_PER_PART, len(data)))) for start in starts]
    faults = [
        fault
        for found in track(_each(_faults, tasks, workers, _samples), "images", total=len(tasks))
        for fault in found
    ]
    if faults:
        media = " or ".join(one.inputs for one in data.modalities)
        raise UserError(
            f"{len(faults)} of {len(data)} samples have {media} that cannot be used, first: {min(faults)[1]}"
        )


MOVED_CHECKED = 16
"""Samples whose images and sounds are read where they were moved to."""


def _faults(data: ChatDataset, samples: range) -> list[tuple[int, str]]:
    """List (sample, error) of samples with changed or damaged images or sounds."""
    found = []
    for sample in samples:
        try:
            for reader in data.readers.values():
                reader.decode_all(data.sample(sample))
        except UserError as error:
            found.append((sample, str(error)))
    return found


def preprocess_shard(
    job: PreprocessJob, shard: Shard, workers: int = 1, max_rejects: int | None = None
) -> dict[str, Any]:
    """Prepare one shard's parts, for `merge_shards`; return its name and number of parts.

    Shards hold a shared lock on the output and run concurrently.
    """
    with working_on(job.output, exclusive=False):
        if job.finished() is None:
            _prepare(job, shard, workers, max_rejects)
    return {"shard": f"{shard.index}/{shard.count}", "parts": len(range(shard.index, len(job.sources), shard.count))}


def merge_shards(job: PreprocessJob, max_rejects: int | None = None) -> dict[str, Any]:
    """Wait for the shards and join their parts; return the manifest. Raises `UserError` if parts are missing."""
    with working_on(job.output):
        if (done := _finished(job, max_rejects)) is not None:
            return done
        if missing := job.missing():
            raise UserError(
                f"{job.work}: {len(missing)} of {len(job.sources)} parts are missing, the first is {missing[0]}; "
                "run the shards that did not end (part p is of shard p modulo n), with the same flags"
            )
        job.work.mkdir(parents=True, exist_ok=True)
        return merge(job, max_rejects)


def _finished(job: PreprocessJob, max_rejects: int | None) -> dict[str, Any] | None:
    """Return the manifest of this job's complete folder, if any, checked by today's reject limit; remove its parts."""
    manifest = job.finished()
    if manifest is not None:
        rejected = job.output / "rejected.jsonl"
        RejectCount.of_file(rejected).check(reject_limit(job.lines, max_rejects), job.lines, rejected)
        _follow(job, manifest)
        job.tidy()
    return manifest


def _follow(job: PreprocessJob, manifest: dict[str, Any]) -> None:
    """Note in a complete folder where its inputs and images lie now.

    Raises UserError unless the images are those of before, as a few samples show; the rest is checked as it is read.
    """
    now, noted = [where_is(file) for file in job.inputs], sources_now(job.output, manifest["sources"])
    if all(where.items() <= source.items() for where, source in zip(now, noted, strict=True)):
        return
    data = ChatDataset(job.output)
    data.sources = Sources([{**source, **where} for source, where in zip(noted, now, strict=True)])
    if faults := _faults(data, range(0, len(data), max(1, len(data) // MOVED_CHECKED))):
        raise UserError(f"{job.output}: made from these files, but with other images: {faults[0][1]}")
    note_moved(job.output, now)


def _prepare(job: PreprocessJob, shard: Shard, workers: int, max_rejects: int | None) -> None:
    """Make the missing parts of a shard.

    Raises `UserError` early if over the limit and most of the lines so far are rejected, as with a wrong image root.
    """
    job.work.mkdir(parents=True, exist_ok=True)
    remove_unfinished(job.work)
    numbers, rejects, limit = job.missing(shard), RejectCount(), reject_limit(job.lines, max_rejects)

    def lines() -> Iterator[int]:  # yields once per line for the progress bar
        seen = 0
        tasks = [(job.recipe, job.sources[number], job.part_path(number)) for number in numbers]
        for count, rejections in _each_part(_prepare_one, tasks, workers):
            rejects.add(rejections)
            seen += count
            if rejects.total > max(limit, seen // 2):
                rejects.check(limit, seen, _list_rejects(job))
            yield from range(count)

    for _ in track(lines(), "preprocess", total=sum(job.sources[number].lines for number in numbers)):
        pass


def _list_rejects(job: PreprocessJob) -> Path:
    """Write the rejected lines of all ready parts to a file; return its path."""
    path, missing = job.work / "rejected.jsonl", set(job.missing())
    ready = (number for number in range(len(job.sources)) if number not in missing)
    with replacing(path) as file:
        file.writelines(ready_part(job, number).rejected.tobytes() for number in ready)
    return path


def _each_part(work: Callable[..., Value], tasks: Sequence[tuple[Any, ...]], workers: int) -> Iterator[Value]:
    """Do tasks (recipe, source, ...) as `_each` does; in other processes if a source is a table: reading a damaged one
    may end the process."""
    has_tables = any(source.format == "table" for _, source, *_ in tasks)
    return _each(work, tasks, workers, _lines, has_tables)


def _each(
    work: Callable[..., Value],
    tasks: Sequence[tuple[Any, ...]],
    workers: int,
    name_of: Callable[..., str],
    apart: bool = False,
) -> Iterator[Value]:
    """Yield `work(*task)` of every task, in order of completion, by other processes if there are several workers."""
    if apart or workers > 1:
        return each_apart(work, tasks, workers, name_of)
    return (work(*task) for task in tasks)


def _lines(_: Recipe, source: PartSource, *__: Any) -> str:
    return source.lines_named


def _samples(data: ChatDataset, samples: range) -> str:
    return f"{data.folder}: samples {samples[0]} to {samples[-1]}"


def _preview_one(recipe: Recipe, source: PartSource) -> tuple[int, list[dict[str, Any]]]:
    return source.lines, prepare_part(recipe, source).rejections()


def _measure_one(recipe: Recipe, source: PartSource, number: int) -> tuple[int, _Measured]:
    """Return number, sizes and rejections of a part."""
    part = prepare_part(recipe, source)
    return number, ({name: part.column(name) for name in of_samples(recipe)}, part.rejections())


def _prepare_one(recipe: Recipe, source: PartSource, path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Prepare a part and write its file; return its number of lines and its rejections."""
    part = prepare_part(recipe, source)
    part.save(path)
    return source.lines, part.rejections()
