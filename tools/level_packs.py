"""Reorder the packs of an index so that ranks wait little at another data-parallel size, with which a run resumes.

The global batch stays the same. The order is written into the index's folder; runs with that data-parallel size use it
from --iteration on.
"""

import argparse

from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.flags import Interval, ToolParser
from omnibal_ext.packing.command import pack_parser
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.rebalanced import RankLayout, rebalance, write_rebalanced
from omnibal_ext.packing.options import LAST_ITERATION
from omnibal_ext.packing.ordering.metrics import wait

NUMBERS = (Interval("[0, inf)", "iteration"),)
MEASURED = 1000
"""Iterations, from --iteration on, over which waiting is measured."""


def main() -> None:
    """Run omnibal level: reorder an index's packs for another number of ranks, write the order, print waits."""
    arguments = _parser().parse_args()
    index, size, since = PackedIndex.open(arguments.packs), arguments.data_parallel_size, arguments.iteration
    if index.global_batch % size:
        raise UserError(f"--data-parallel-size {size}: must divide the {index.global_batch} packs of an iteration")
    if size == index.manifest.get("data_parallel_size"):
        raise UserError(f"--data-parallel-size {size}: {arguments.packs} is packed for that; there is nothing to do")
    if index.wide is not None:
        raise UserError(
            f"{arguments.packs}: has packs wider than a rank, whose slots are assigned anew at any size; nothing to do"
        )
    last_iteration = arguments.last_iteration or str(index.manifest["last_iteration"])
    ranks = RankLayout(size, index.global_batch // size, last_iteration)
    waits = [_waits(index, ranks, since)]
    order = PackStream(index, *ranks).order
    path = write_rebalanced(index, ranks, rebalance(index, order, ranks, since))
    waits.append(_waits(index, ranks, since))
    found = {"written": str(path), "iteration": since, "wait_before": waits[0], "wait": waits[1]}
    if arguments.json:
        print_json(found)
    else:
        print_table(f"{index.folder} for {size} ranks", ("", ""), [(name, str(value)) for name, value in found.items()])


def _waits(index: PackedIndex, ranks: RankLayout, since: int) -> float:
    """Return the share of time that data-parallel ranks wait, predicted over `MEASURED` iterations from `since` on."""
    stream = PackStream(index, *ranks)
    iterations = stream.iterations(since, since + min(MEASURED, stream.iterations_per_epoch))
    packs = iterations.clip(min=0)
    seconds = index.seconds(packs.ravel()).reshape(*packs.shape, -1) * (iterations >= 0)[..., None]
    return wait(seconds.sum(axis=2))


def _parser() -> ToolParser:
    parser = ToolParser(numbers=NUMBERS, description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("packs", help="the packed index")
    needed = {"required": True, "default": None, "help": "of the run that goes on"}
    parser.borrow(parser, pack_parser(), ("data_parallel_size",), data_parallel_size=needed)
    parser.add_argument("--iteration", type=int, default=0, help="the first one that runs at that size")
    parser.add_argument("--last-iteration", choices=LAST_ITERATION, help="of the run (default: the index's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


if __name__ == "__main__":
    run_tool(main)
