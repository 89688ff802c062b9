"""The last step of preprocessing: all parts of a job, in order, become one dataset folder, which appears at once."""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron.vlm.data.dataset import COLUMNS, SCHEMA_VERSION, ColumnWriter
from megatron.vlm.data.job import Job
from megatron.vlm.data.parts import Part
from megatron.vlm.data.rejects import RejectCount
from megatron.vlm.data.samples import open_recipe
from megatron.vlm.data.templates import IMAGE_CONTEXT
from omnibal_ext.errors import UserError
from omnibal_ext.sizes import Sizes


def merge(job: Job, max_rejects: int | None = None) -> dict[str, Any]:
    """Join the parts into the dataset folder and return its manifest.

    Raises `UserError` if more than `max_rejects` lines were rejected, or all of them; the parts are kept then.
    """
    folder = job.work / "dataset"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    sizes, rejects = _join_parts([job.part_path(number) for number in range(len(job.sources))], folder)
    rejects.check(max_rejects)
    if not len(sizes):
        raise UserError(f"no line of the input can be used: {rejects.describe()}; see {folder / 'rejected.jsonl'}")
    sizes.save(folder / "sizes.npz")
    manifest = _manifest(job, sizes, rejects.by_reason)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    folder.rename(job.output)
    job.tidy()
    return manifest


def _join_parts(paths: Sequence[Path], folder: Path) -> tuple[Sizes, RejectCount]:
    writers = {name: ColumnWriter(folder, name) for name in COLUMNS}
    tiles, tokens, rejects = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)], RejectCount()
    with (folder / "rejected.jsonl").open("wb") as rejected:
        for path in paths:
            part = Part.load(path)
            writers["tokens"].append(part.tokens, part.token_lengths)
            writers["loss_mask"].append(part.loss_mask, part.token_lengths)
            writers["images"].append(part.images, part.image_lengths)
            tiles.append(part.tiles)
            tokens.append(part.token_lengths)
            rejected.write(part.rejected.tobytes())
            rejects.add(part.rejections())
    for writer in writers.values():
        writer.close()
    return Sizes.from_arrays(np.concatenate(tiles), np.concatenate(tokens)), rejects


def _manifest(job: Job, sizes: Sizes, rejected: Counter[str]) -> dict[str, Any]:
    recipe, maker = job.recipe, open_recipe(job.recipe)
    tokenizer, digest = maker.tokenizer, job.identity["recipe"]["tokenizer"]
    return {
        "schema_version": SCHEMA_VERSION,
        "samples": len(sizes),
        "rejected": rejected.total(),
        "rejected_by_reason": dict(sorted(rejected.items())),
        "tiles": int(sizes.tiles.sum()),
        "tokens": int(sizes.tokens.sum()),
        "image_root": str(recipe.image_root.resolve()),
        "tokenizer": {"path": str(recipe.tokenizer.resolve()), "sha256": digest, "type": tokenizer.kind},
        "vocab_size": tokenizer.vocab_size,
        "image_token_id": tokenizer.token_id(IMAGE_CONTEXT),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.token_id(maker.template.end_of_turn),
        "chat_template": recipe.template,
        "tile_size": recipe.tiling.tile_size,
        "tokens_per_tile": recipe.tokens_per_tile,
        "tiling": asdict(recipe.tiling),
        "normalization": recipe.normalization,
        "made_from": job.identity,
    }
