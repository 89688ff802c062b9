"""Preprocessing from end to end: input files -> parts, by several processes -> one dataset folder.

1. Cut the inputs into parts and hash them.
2. Prepare every part that is not there yet (`parts`), in `OUTPUT.work/`.
3. Join the parts in order into a dataset folder, and rename it to its final name.

Killed at any moment and started again, it goes on where it was and ends with the same bytes.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.vlm.data.parts import InputFile, Part, PartSource, prepare_part, read_input
from megatron.vlm.data.samples import Recipe, open_recipe
from megatron.vlm.data.templates import IMAGE_CONTEXT
from omnibal_ext.console import track
from omnibal_ext.errors import UserError
from omnibal_ext.sizes import Sizes


@dataclass(frozen=True, slots=True)
class Job:
    """A run: what is read, how, and where it goes."""

    inputs: tuple[InputFile, ...]
    recipe: Recipe
    output: Path

    @property
    def sources(self) -> list[PartSource]:
        """All parts, in the order of the samples."""
        return [part for file in self.inputs for part in file.parts]

    @property
    def work(self) -> Path:
        """Where parts wait until all of them are there."""
        return self.output.with_name(self.output.name + ".work")

    def part_path(self, number: int) -> Path:
        """The file of a part."""
        return self.work / f"{number:07d}.npz"

    def identity(self) -> dict[str, Any]:
        """What decides the bytes of the result, as JSON."""
        recipe = {**asdict(self.recipe), "image_root": str(self.recipe.image_root)}
        recipe["tokenizer"] = file_sha256(self.recipe.tokenizer)
        files = [{"path": str(file.path), "sha256": file.sha256, "lines": file.lines} for file in self.inputs]
        return {"inputs": files, "recipe": recipe}


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def preprocess(inputs: Sequence[Path], recipe: Recipe, output: Path, workers: int = 1) -> dict[str, Any]:
    """Write the dataset folder `output` and return its manifest.

    Raises `UserError` if an input, the tokenizer or the image root is not there, or `output` holds something else.
    """
    if not recipe.image_root.is_dir():
        raise UserError(f"{recipe.image_root}: no such folder; --image-root is where image paths start from")
    open_recipe(recipe)  # a bad tokenizer or template must fail here, not in every worker
    job = Job(tuple(read_input(path) for path in inputs), recipe, output)
    done = _finished(job)
    if done is not None:
        return done
    _claim_work_folder(job)
    missing = [number for number in range(len(job.sources)) if not job.part_path(number).exists()]
    for _ in track(_prepare(job, missing, workers), "preprocess", total=len(missing)):
        pass
    return merge(job)


def _finished(job: Job) -> dict[str, Any] | None:
    """The manifest in the output folder, if it is this job's."""
    path = job.output / "manifest.json"
    if not path.exists():
        if job.output.exists() and (not job.output.is_dir() or any(job.output.iterdir())):
            raise UserError(f"{job.output}: exists and is no dataset; choose another --output-dir")
        return None
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if manifest.get("made_from") != job.identity():
        raise UserError(f"{job.output}: holds a dataset made otherwise; remove it or choose another --output-dir")
    shutil.rmtree(job.work, ignore_errors=True)
    return manifest


def _claim_work_folder(job: Job) -> None:
    """Create the folder of parts, or make sure that the parts in it are this job's."""
    job.work.mkdir(parents=True, exist_ok=True)
    path, identity = job.work / "job.json", job.identity()
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != identity:
        raise UserError(f"{job.work}: unfinished work of other inputs or flags; remove it or change --output-dir")
    temporary = path.with_name(f".job.json.{os.getpid()}")
    temporary.write_text(json.dumps(identity), encoding="utf-8")
    temporary.replace(path)


def _prepare(job: Job, numbers: Sequence[int], workers: int) -> Iterator[int]:
    """Prepare parts, yielding the number of each when its file is there."""
    if workers <= 1:
        for number in numbers:
            yield _prepare_one(job.recipe, job.sources[number], job.part_path(number), number)
        return
    # Forked: a fresh interpreter would spend seconds importing torch before its first line.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent) as pool:
        sources = job.sources
        futures = [
            pool.submit(_prepare_one, job.recipe, sources[number], job.part_path(number), number) for number in numbers
        ]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _prepare_one(recipe: Recipe, source: PartSource, path: Path, number: int) -> int:
    prepare_part(recipe, source).save(path)
    return number


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""

    def wait_and_end() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait_and_end, daemon=True).start()


def merge(job: Job) -> dict[str, Any]:
    """Join all parts, in order, into the dataset folder; return its manifest."""
    # Imported late: workers are forked before torch is in use.
    from megatron.vlm.data.dataset import COLUMNS, ColumnWriter

    folder = job.work / "dataset"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    writers = {name: ColumnWriter(folder, name) for name in COLUMNS}
    tiles, tokens, reasons = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)], Counter[str]()
    with (folder / "rejected.jsonl").open("wb") as rejected:
        for number in range(len(job.sources)):
            part = Part.load(job.part_path(number))
            writers["tokens"].append(part.tokens, part.token_lengths)
            writers["loss_mask"].append(part.loss_mask, part.token_lengths)
            writers["images"].append(part.images, part.image_lengths)
            tiles.append(part.tiles)
            tokens.append(part.token_lengths)
            rejected.write(part.rejected.tobytes())
            reasons.update(row["reason"] for row in part.rejections())
    for writer in writers.values():
        writer.close()
    sizes = Sizes.from_arrays(np.concatenate(tiles), np.concatenate(tokens))
    sizes.save(folder / "sizes.npz")
    manifest = _manifest(job, sizes, reasons)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    folder.rename(job.output)
    shutil.rmtree(job.work)
    return manifest


def _manifest(job: Job, sizes: Sizes, reasons: Counter[str]) -> dict[str, Any]:
    from megatron.vlm.data.dataset import SCHEMA_VERSION

    recipe, maker = job.recipe, open_recipe(job.recipe)
    tokenizer, template = maker.tokenizer, maker.template
    identity = job.identity()
    path = str(recipe.tokenizer.resolve())
    return {
        "schema_version": SCHEMA_VERSION,
        "samples": len(sizes),
        "rejected": reasons.total(),
        "rejected_by_reason": dict(sorted(reasons.items())),
        "tiles": int(sizes.tiles.sum()),
        "tokens": int(sizes.tokens.sum()),
        "image_root": str(recipe.image_root.resolve()),
        "tokenizer": {"path": path, "sha256": identity["recipe"]["tokenizer"], "type": tokenizer.kind},
        "vocab_size": tokenizer.vocab_size,
        "image_token_id": tokenizer.token_id(IMAGE_CONTEXT),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.token_id(template.end_of_turn),
        "chat_template": recipe.template,
        "tile_size": recipe.tiling.tile_size,
        "tokens_per_tile": recipe.tokens_per_tile,
        "tiling": asdict(recipe.tiling),
        "normalization": recipe.normalization,
        "made_from": identity,
    }
