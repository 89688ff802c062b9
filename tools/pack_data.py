"""Pack a corpus: sizes of samples in, a packed index and its measures out, before any GPU is booked."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.packing import METHODS, PackOptions, PackStream, Summary, build_index, epoch_iterations
from omnibal_ext.packing.dispatch import LAST_ITERATION
from omnibal_ext.packing.index import sha256_of
from omnibal_ext.sizes import Sizes


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    corpus = parser.add_mutually_exclusive_group(required=True)
    corpus.add_argument("--data", metavar="FOLDER", help="a dataset folder of tools/preprocess_data.py")
    corpus.add_argument("--sizes", nargs="+", metavar="FILE", help="sizes files, .json or .npz; several are one corpus")
    parser.add_argument("--output-dir", required=True, help="the packed index to write")
    parser.add_argument("--method", choices=METHODS, default=METHODS[0])
    parser.add_argument("--vit-budget", type=int, required=True, metavar="TILES", help="most tiles of a pack")
    parser.add_argument("--llm-budget", type=int, required=True, metavar="TOKENS", help="most tokens of a pack")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="M", help="packs of an iteration on each rank")
    parser.add_argument("--data-parallel-size", type=int, default=1, metavar="D")
    parser.add_argument("--samples-per-pack", type=int, default=4, help="for methods that pad")
    parser.add_argument("--last-iteration", choices=LAST_ITERATION, default="next_epoch", help="what fills it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--dump-iterations", metavar="FILE", help="write pack numbers, int64 [iterations, D, M], of epoch 0"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser.parse_args()


def load_corpus(arguments: argparse.Namespace) -> tuple[Sizes, dict[str, Any], list[tuple[str, int]]]:
    """Return sizes, what they were read from with hashes, and the number of samples of each file."""
    paths = [Path(arguments.data) / "sizes.npz"] if arguments.data else [Path(path) for path in arguments.sizes]
    parts = [Sizes.load(path) for path in paths]
    built_from: dict[str, Any] = {"sizes": {str(path): sha256_of(path) for path in paths}}
    if arguments.data:
        manifest = Path(arguments.data) / "manifest.json"
        if not manifest.is_file():
            raise UserError(f"{manifest}: is missing: run tools/preprocess_data.py to its end")
        built_from["data"] = {"manifest_sha256": sha256_of(manifest), "manifest": json.loads(manifest.read_text())}
    return (
        Sizes.concatenate(parts),
        built_from,
        [(str(path), len(part)) for path, part in zip(paths, parts, strict=True)],
    )


def show(summary: Summary, output_dir: str) -> None:
    """Print the measures as a table."""
    values = {name.replace("_", " "): value for name, value in asdict(summary).items() if value != {}}
    rows = [(name, f"{value:,.4f}" if isinstance(value, float) else value) for name, value in values.items()]
    print_table(f"Packed index {output_dir}", ("measure", "value"), rows)


def main() -> None:
    """Pack, write, report."""
    arguments = parse_arguments()
    names = (
        "method", "vit_budget", "llm_budget", "micro_batches", "data_parallel_size", "samples_per_pack",
        "last_iteration", "seed",
    )  # fmt: skip
    options = PackOptions(**{name: getattr(arguments, name) for name in names})
    sizes, built_from, sources = load_corpus(arguments)
    index, summary = build_index(sizes, arguments.output_dir, options, built_from, sources)
    if arguments.dump_iterations:
        stream = PackStream(index, options.data_parallel_size, options.micro_batches)
        np.save(arguments.dump_iterations, epoch_iterations(stream), allow_pickle=False)
    if arguments.json:
        print_json(asdict(summary))
    else:
        show(summary, arguments.output_dir)


if __name__ == "__main__":
    run_tool(main)
