"""Pack a corpus, from the sizes of its samples to a packed index and its measures; needs no GPU."""

import argparse
from dataclasses import asdict
from pathlib import Path

import numpy as np

from omnibal_ext.console import print_json, print_table, say_wrapped
from omnibal_ext.errors import run_tool
from omnibal_ext.files.records import write_text
from omnibal_ext.files.writing import replacing
from omnibal_ext.output import say
from omnibal_ext.packing.command import pack, pack_parser, show, take_options
from omnibal_ext.packing.index.dispatch import PackStream, epoch_iterations
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.why import why
from omnibal_ext.report.against_random import sizes_of
from omnibal_ext.report.packing import PackingView
from omnibal_ext.report.page import report


def parse_arguments() -> argparse.Namespace:
    """Read the command line; what it leaves out comes from the index of --like or --held-out-of, if given."""
    parser = pack_parser(__doc__)
    take_options(parser, vars(parser.parse_args()))
    return parser.parse_args()


def explain(arguments: argparse.Namespace) -> None:
    """Print in which packs an index has the sample of --why, and why; with --report also write the page."""
    index = PackedIndex.open(arguments.output_dir)
    sizes = sizes_of(index)
    answer = why(index, arguments.why, sizes)
    if arguments.report:
        write_text(Path(arguments.report), report([], [PackingView(index, sizes, asked=answer)]))
    if arguments.json:
        print_json(answer.to_record())
        return
    own = "".join(f", {units:,} {size}" for size, units in answer.sizes.items())
    say(f"sample {answer.sample}, row {answer.row} of {answer.source}{own}")
    if answer.left_out:
        say(f"in no pack: {answer.left_out}")
    for placed in answer.packs:
        rows = [
            (size, f"{load:,}", f"{budget:,}", f"{budget - load:,}", f"{load / budget:.1%}")
            for size, load, budget in placed.used
        ]
        ranks = ", ".join(map(str, placed.ranks))
        where = f"iteration {placed.iteration} of epoch {placed.epoch}, rank {ranks}, microbatch {placed.micro_batch}"
        print_table(f"Pack {placed.pack}: {where}", ("size", "in it", "budget", "left", "used"), rows)
        others = [number for number in placed.samples if number != answer.sample]
        say_wrapped(f"with {', '.join(map(str, others))}" if others else "alone in it", *placed.reasons)


def main() -> None:
    """Pack, or explain a packing; print it."""
    arguments = parse_arguments()
    if arguments.why:
        explain(arguments)
        return
    packed = pack(arguments)
    tried = [asdict(trial) for trial in packed.trials]
    if arguments.dump_iterations:
        stream = PackStream(packed.index, arguments.data_parallel_size, arguments.micro_batches)
        with replacing(Path(arguments.dump_iterations)) as file:
            np.save(file, epoch_iterations(stream), allow_pickle=False)
    if arguments.report:
        view = PackingView.of_summary(packed.index, packed.corpus, packed.summary, tried)
        write_text(Path(arguments.report), report([], [view]))
    if arguments.json:
        print_json({**packed.summary.to_record(), "faults": packed.faults, "tried": tried})
    else:
        show(packed)


if __name__ == "__main__":
    run_tool(main)
