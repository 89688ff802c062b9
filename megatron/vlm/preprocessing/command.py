"""What omnibal preprocess does with its command line (`omnibal_ext/preprocess_flags.py`)."""

import argparse
from collections.abc import Mapping
from typing import Any

from megatron.vlm.preprocessing.folder_files import FlagValue
from megatron.vlm.preprocessing.job import Shard, open_job
from megatron.vlm.preprocessing.model_recipe import (
    check_tokenizer,
    recipe_of,
    resolve_settings,
    with_pixels,
    with_video,
)
from megatron.vlm.preprocessing.preprocess import merge_shards, preprocess, preprocess_shard, preview
from megatron.vlm.preprocessing.recipe import Recipe
from megatron.vlm.preprocessing.samples import open_recipe
from omnibal_ext.preprocess_flags import DEFAULTS

LINES_LOOKED_AT = 32
"""Lines of every input that --check reads."""


def choices_of(arguments: argparse.Namespace) -> dict[str, FlagValue]:
    """Return each setting that decides what a line becomes, by flag: its value and origin (flag, model, default)."""
    decided = ("tokenizer-model", "chat-template", *DEFAULTS)
    choices = resolve_settings({flag: getattr(arguments, flag.replace("-", "_")) for flag in decided}, arguments.model)
    choices = with_pixels(choices, arguments.max_pixels)
    fields = {"fps": arguments.video_fps, "max_frames": arguments.video_max_frames}
    return with_video(choices, {field: value for field, value in fields.items() if value is not None})


def recipe_by(arguments: argparse.Namespace, choices: Mapping[str, FlagValue]) -> Recipe:
    """Make the recipe of a command line; `choices`: what `choices_of` returns for it."""
    return recipe_of(
        choices,
        image_root=arguments.image_root,
        max_tokens=arguments.max_tokens,
        shorten=tuple(arguments.shorten),
        decode_images=arguments.decode_images,
        image_checksums=arguments.image_checksums,
        system_message=arguments.system_message,
        use_audio_in_video=arguments.use_audio_in_video,
    )


def run(arguments: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """Check, preprocess or merge, as the command line says; return what is printed."""
    if arguments.model:
        check_tokenizer(open_recipe(recipe), arguments.model)
    if arguments.check:
        job = open_job(arguments.input, recipe, arguments.output_dir, LINES_LOOKED_AT)
        return {"detail": preview(job, arguments.max_rejects)}
    shared = bool(arguments.shard) or arguments.merge
    job = open_job(arguments.input, recipe, arguments.output_dir, shared=shared)
    if arguments.shard:
        return preprocess_shard(job, Shard.parse(arguments.shard), arguments.workers, arguments.max_rejects)
    if arguments.merge:
        manifest = merge_shards(job, arguments.max_rejects)
    else:
        manifest = preprocess(job, arguments.workers, arguments.max_rejects)
    return {key: manifest[key] for key in ("samples", "rejected", "tiles", "tokens", "rejected_by_reason", "shortened")}
