"""The command line of omnibal preprocess, and what its flags default to; reading it imports no torch."""

from pathlib import Path

from omnibal_ext.architectures.presets import MODEL_FLAGS
from omnibal_ext.families.media import TILINGS
from omnibal_ext.families.registry import MARKUPS, TEMPLATES
from omnibal_ext.flags import Interval, Need, ToolParser
from omnibal_ext.modalities.vision.normalization import NORMALIZATIONS
from omnibal_ext.reading.stores import located

DEFAULTS = {
    "tiling": "internvl",
    "tile-size": 448,
    "tokens-per-tile": 256,
    "normalize": "imagenet",
    "image-markup": "internvl",
    "min-tiles": 1,
    "max-tiles": 12,
    "thumbnail": True,
}
"""Used if neither flag nor model sets them."""
SHORTENINGS = ("fewer-tiles", "truncate")
"""Ways to shorten a sample; datasets note them by position."""
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


def preprocess_parser(description: str | None = None) -> ToolParser:
    """Return the command line of omnibal preprocess."""
    parser = ToolParser(numbers=NUMBERS, needs=NEEDS, description=description)
    usual = {flag: f"(default {value}, or the model's)" for flag, value in DEFAULTS.items()}
    add = parser.add_argument
    add(
        "--input",
        type=located,
        nargs="+",
        required=True,
        help="chat JSONL, JSON lists, InternVL's meta file, Parquet, Arrow or a folder of them, tars: docs/data.md",
    )
    add("--image-root", type=located, help="the folder that image paths start from (default: that of each input)")
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
    add("--shorten", nargs="+", choices=SHORTENINGS, default=(), help="ways to shorten them, tried in this order")
    add("--decode-images", action="store_true", help="decode every image: slow; of a dataset that is there, again")
    add("--no-image-checksums", dest="image_checksums", action="store_false", help="read headers of images only")
    add("--system-message", help='for conversations without one; "" for none')
    add("--max-rejects", type=int, help="fail if more lines than this cannot be used (default 1%%, at least 10)")
    add("--shard", type=str, metavar="I/N", help="prepare only every N-th part from I on, and do not join")
    add("--merge", action="store_true", help="join what all shards have prepared")
    add("--check", action="store_true", help="read the first lines of every input, write nothing")
    add("--json", action="store_true", help="print one JSON object")
    return parser
