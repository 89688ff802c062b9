"""Chat JSONL and images to a dataset folder: tokens, loss masks, sizes, image references, rejects."""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.vlm.data.images import NORMALIZATIONS
from megatron.vlm.data.preprocess import preprocess
from megatron.vlm.data.samples import Recipe
from megatron.vlm.data.templates import TEMPLATES
from megatron.vlm.data.tiles import RULES, Tiling
from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import run_tool


def positive(text: str) -> int:
    """A whole number of 1 or more, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="InternVL chat JSONL files")
    parser.add_argument("--image-root", type=Path, required=True, help="the folder that image paths start from")
    parser.add_argument("--tokenizer-model", type=Path, required=True, help="a sentencepiece .model or a tokenizer.json")
    parser.add_argument("--chat-template", required=True, help=f"one of {', '.join(TEMPLATES)}")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--workers", type=positive, default=1, help="processes")
    parser.add_argument("--tiling", choices=list(RULES), default="internvl", help="(default %(default)s)")
    parser.add_argument("--tile-size", type=positive, default=448, help="pixels a side (default %(default)s)")
    parser.add_argument("--tokens-per-tile", type=positive, default=256, help="LLM tokens a tile (default %(default)s)")
    parser.add_argument("--min-tiles", type=positive, default=1)
    parser.add_argument("--max-tiles", type=positive, default=12, help="a conversation, thumbnails not counted")
    parser.add_argument("--no-thumbnail", action="store_true", help="no tile of the whole image after the others")
    parser.add_argument("--max-tokens", type=positive, help="reject longer samples (nothing is ever cut)")
    parser.add_argument("--decode-images", action="store_true", help="decode every image: slow, finds flipped bits too")
    parser.add_argument("--normalize", choices=list(NORMALIZATIONS), default="imagenet", help="(default %(default)s)")
    parser.add_argument("--system-message", help="for conversations without one; \"\" for none")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> None:
    """Run the tool."""
    arguments = parse_arguments()
    started = time.perf_counter()
    tiling = Tiling(
        arguments.tile_size, arguments.min_tiles, arguments.max_tiles, not arguments.no_thumbnail, arguments.tiling
    )
    recipe = Recipe(
        image_root=arguments.image_root,
        tokenizer=arguments.tokenizer_model,
        template=arguments.chat_template,
        tiling=tiling,
        tokens_per_tile=arguments.tokens_per_tile,
        max_tokens=arguments.max_tokens,
        decode_images=arguments.decode_images,
        system_message=arguments.system_message,
        normalization=arguments.normalize,
    )
    manifest = preprocess(arguments.input, recipe, arguments.output_dir, arguments.workers)
    counts = {key: manifest[key] for key in ("samples", "rejected", "tiles", "tokens", "rejected_by_reason")}
    if arguments.json:
        seconds = round(time.perf_counter() - started, 3)
        print_json({"output_dir": str(arguments.output_dir), **counts, "seconds": seconds})
        return
    rows = [(key, f"{counts[key]:,}") for key in ("samples", "rejected", "tiles", "tokens")]
    rows += [(f"rejected: {reason}", f"{count:,}") for reason, count in counts["rejected_by_reason"].items()]
    print_table(f"Dataset {arguments.output_dir}", ("", "count"), rows)


if __name__ == "__main__":
    run_tool(main)
