"""Conversations and images to a dataset folder: tokens, loss masks, sizes, image references, rejects."""

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omnibal_ext.architectures.presets import MODEL_FLAGS
from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import exit_on_user_error, run_tool
from omnibal_ext.flags import Interval, Need, ToolParser
from omnibal_ext.output import say

with exit_on_user_error():
    from megatron.vlm.data.markup import MARKUPS
    from megatron.vlm.data.media.images import NORMALIZATIONS
    from megatron.vlm.data.templates import TEMPLATES
    from megatron.vlm.preprocessing.folder_files import FlagValue
    from megatron.vlm.preprocessing.job import Shard, open_job
    from megatron.vlm.preprocessing.model_recipe import (
        DEFAULTS,
        check_tokenizer,
        recipe_of,
        resolve_settings,
        with_pixels,
        with_video,
    )
    from megatron.vlm.preprocessing.preprocess import merge_shards, preprocess, preprocess_shard, preview
    from megatron.vlm.preprocessing.recipe import Recipe
    from megatron.vlm.preprocessing.samples import open_recipe
    from megatron.vlm.preprocessing.shorten import METHODS
    from omnibal_ext.families.media import TILINGS

LINES_LOOKED_AT = 32
"""Lines of every input that --check reads."""
NUMBERS = (
    Interval("[1, inf)", "tile_size tokens_per_tile min_tiles max_tiles max_pixels video_max_frames max_tokens"),
    Interval("(0, inf)", "video_fps"),
    Interval("[1, 1024]", "workers"),
    Interval("[0, inf)", "max_rejects"),
)
NEEDS = (
    Need("max_pixels", "to be given without --max-tiles", lambda given: given.max_tiles is None),
    Need("check", "to be given without --shard or --merge", lambda given: not (given.shard or given.merge)),
)


def _parser() -> ToolParser:
    parser = ToolParser(numbers=NUMBERS, needs=NEEDS, description=__doc__)
    usual = {flag: f"(default {value}, or the model's)" for flag, value in DEFAULTS.items()}
    add = parser.add_argument
    add(
        "--input",
        type=Path,
        nargs="+",
        required=True,
        help="chat JSONL, JSON lists, InternVL's meta file, Parquet, Arrow or a folder of them, tars: docs/data.md",
    )
    add("--image-root", type=Path, help="the folder that image paths start from (default: that of each input)")
    add(*MODEL_FLAGS, help="a preset or a Hugging Face folder that the data is for: it decides what is not given below")
    add("--tokenizer-model", type=Path, help="a sentencepiece .model or a tokenizer.json (or the model folder's)")
    add("--chat-template", help=f"one of {', '.join(TEMPLATES)}, or a .jinja file (default: the model's)")
    add("--output-dir", type=Path, required=True)
    add("--workers", type=int, default=1, help="processes")
    add("--image-markup", choices=list(MARKUPS), help=f"the words around images {usual['image-markup']}")
    add("--tiling", choices=list(TILINGS), help=usual["tiling"])
    add("--tile-size", type=int, help=f"pixels a side {usual['tile-size']}")
    add("--tokens-per-tile", type=int, help=f"LLM tokens a tile {usual['tokens-per-tile']}")
    add("--min-tiles", type=int, help=usual["min-tiles"])
    add("--max-tiles", type=int, help=f"a conversation, thumbnails not counted {usual['max-tiles']}")
    add("--max-pixels", type=int, help="an image, for models that see it near its own size; instead of --max-tiles")
    add("--no-thumbnail", dest="thumbnail", action="store_const", const=False, help="no tile of the whole image")
    add("--video-fps", type=float, help="frames a second of a video that are seen (default: the model's)")
    add("--video-max-frames", type=int, help="most frames of a video that are seen (default: the model's)")
    add("--use-audio-in-video", action="store_true", help="hear the sound of videos, for models that see and hear them")
    add("--normalize", choices=list(NORMALIZATIONS), help=usual["normalize"])
    add("--max-tokens", type=int, help="reject longer samples, unless --shorten makes them fit")
    add("--shorten", nargs="+", choices=METHODS, default=(), help="ways to shorten them, tried in this order")
    add("--decode-images", action="store_true", help="decode every image: slow; of a dataset that is there, again")
    add("--no-image-checksums", dest="image_checksums", action="store_false", help="read headers of images only")
    add("--system-message", help='for conversations without one; "" for none')
    add("--max-rejects", type=int, help="fail if more lines than this cannot be used (default 1%%, at least 10)")
    add("--shard", type=str, metavar="I/N", help="prepare only every N-th part from I on, and do not join")
    add("--merge", action="store_true", help="join what all shards have prepared")
    add("--check", action="store_true", help="read the first lines of every input, write nothing")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def choices_of(arguments: argparse.Namespace) -> dict[str, FlagValue]:
    """What flags and model say a line is to become, and who says it."""
    decided = ("tokenizer-model", "chat-template", *DEFAULTS)
    choices = resolve_settings({flag: getattr(arguments, flag.replace("-", "_")) for flag in decided}, arguments.model)
    choices = with_pixels(choices, arguments.max_pixels)
    fields = {"fps": arguments.video_fps, "max_frames": arguments.video_max_frames}
    return with_video(choices, {field: value for field, value in fields.items() if value is not None})


def recipe_by(arguments: argparse.Namespace, choices: Mapping[str, FlagValue]) -> Recipe:
    """The same as a recipe."""
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
    """Check, preprocess or merge; return what is printed."""
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


def main() -> None:
    """Run the tool."""
    arguments = _parser().parse_args()
    started = time.perf_counter()
    choices = choices_of(arguments)
    if not arguments.json:
        said = [(flag, str(choice.value), choice.origin) for flag, choice in choices.items()]
        print_table("Read as", ("", "value", "from"), said)
    result = run(arguments, recipe_by(arguments, choices))
    seconds = round(time.perf_counter() - started, 3)
    if arguments.check and not arguments.json:
        say(result["detail"])
        return
    if arguments.json:
        origins = {flag: {"value": str(choice.value), "from": choice.origin} for flag, choice in choices.items()}
        print_json({"output_dir": str(arguments.output_dir), **result, "choices": origins, "seconds": seconds})
        return
    rejected = result.pop("rejected_by_reason", {})
    shortened = result.pop("shortened", {})
    rows = [*result.items(), *((f"rejected: {reason}", count) for reason, count in rejected.items())]
    rows += [(f"shortened: {way}", count) for way, count in shortened.items()]
    shown = [(name, f"{value:,}" if isinstance(value, int) else value) for name, value in rows]
    print_table(f"Dataset {arguments.output_dir}", ("", "count"), shown)


if __name__ == "__main__":
    run_tool(main)
