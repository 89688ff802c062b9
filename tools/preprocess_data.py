"""Conversations and images to a dataset folder: tokens, loss masks, sizes, image references, rejects."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import run_tool
from omnibal_ext.output import say
from omnibal_ext.preprocess_flags import preprocess_parser


def main() -> None:
    """Run omnibal preprocess: make a dataset folder of conversations and images, and print what is in it."""
    arguments = preprocess_parser(__doc__).parse_args()
    # Torch takes seconds to import: help and wrong flags come before.
    from megatron.vlm.preprocessing.command import choices_of, recipe_by, run

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
