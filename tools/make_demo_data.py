"""Demo data: pictures of handwritten digits to be read, as chat JSONL and PNG, and a tokenizer for them."""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import faults_in_a_line, run_tool
from omnibal_ext.flags import Numbers, ToolParser

with faults_in_a_line():
    from megatron.vlm.preprocessing.demo import make_demo_data

NUMBERS = (Numbers("[1, 1e9]", "samples heldout_samples"), Numbers("[0, 4294967295]", "seed"))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = ToolParser(numbers=NUMBERS, description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=1600, help="training conversations (default %(default)s)")
    parser.add_argument("--heldout-samples", type=int, default=100, help="of digits never trained on (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> None:
    """Run the tool."""
    arguments = parse_arguments()
    started = time.perf_counter()
    make_demo_data(arguments.output_dir, arguments.samples, arguments.heldout_samples, arguments.seed)
    seconds = round(time.perf_counter() - started, 3)
    counts = {"samples": arguments.samples, "heldout_samples": arguments.heldout_samples}
    if arguments.json:
        print_json({"output_dir": str(arguments.output_dir), **counts, "seconds": seconds})
    else:
        print_table(f"Demo data {arguments.output_dir}", ("", "count"), list(counts.items()))


if __name__ == "__main__":
    run_tool(main)
