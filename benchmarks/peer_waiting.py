"""How long data-parallel ranks wait for the slowest, by the packs and orders of others and by `pack`.

    python benchmarks/peer_waiting.py [--environment DIR] [--ranks 8 64 512] [--samples 12000] [--corpora NAME...]
        [--picture FILE]

Lengths alone, no model is run: the peers' own code (`peer_orders.py`) puts together the published lengths, a LLaVA-like
corpus (one tile a sample) and one at native resolution (patches), at the same token budget. A step is a pack a rank,
its seconds are those of InternVL3.5 (of Qwen3-VL, where tiles are patches) with 2B or 8B on an H100, counted by
operations. "waiting" is the share of the ranks' time, where each runs all of the model, and with a pipeline, where
they wait in vision and in language. "tiles" is the fullest pack over the budget, which others do not know: with as many
as the least of their fullest, `pack` makes no more packs than they.

The bound is what no packs in random order fall below, as many as those of `pack` (`waiting_bound.py`).
`pack` is used as the integrations do: each rank packs a buffer of 1000 samples of its own with no costs (Energon,
VeOmni), or all lengths are packed together with the model's (Automodel, PackedBatches); beside it is what `omnibal
pack` orders for so many ranks. Milliseconds are the processor's of `pack` on a buffer. The last line is the median over
corpora and models of the least waiting of the others over that of `pack` with costs. The picture, README's, has what an
8B waits at the last number of ranks by the packs of the others and by `omnibal pack`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.level import PUBLISHED, corpus_of
from benchmarks.peer_orders import Question, Steps
from benchmarks.peers import ask_peers, python_of
from benchmarks.waiting_bound import least_of_whole_tiles, least_waiting
from omnibal_ext.console import print_table
from omnibal_ext.errors import run_tool
from omnibal_ext.packing import pack
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.dispatch import PackStream, epoch_iterations
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.metrics import wait
from omnibal_ext.packing.packs import LOADS, PackList, pack_loads
from omnibal_ext.sizes import Sizes

MODELS = {PUBLISHED: "internvl3.5", "single tiles": "internvl3.5", "patches": "qwen3-vl"}
TITLES = {PUBLISHED: "published lengths", "single tiles": "LLaVA-like, single tiles", "patches": "native, patches"}
TOKENS_A_TILE = {PUBLISHED: 256.0, "single tiles": 576.0, "patches": 0.25}
BUFFER, TIMED, BATCH = 1000, (1000, 10_000), 4
BUFFERS, TOGETHER, INDEX = "pack, a rank's buffers of 1000", "pack, all lengths, with costs", "omnibal pack"
THEIR_TILES = "pack, with costs, at their tiles"
OURS = (BUFFERS, TOGETHER, INDEX, THEIR_TILES)
BOUND = "bound of random orders"


def one_part(costs: PackCosts) -> PackCosts:
    """A model that each rank runs whole."""
    units = ("tiles", "tokens", "attention")
    return PackCosts({"all": {unit: sum(part.get(unit, 0.0) for part in costs.parts.values()) for unit in units}})


def waiting(steps: Steps, sizes: Sizes, costs: PackCosts) -> float:
    """Share of the ranks' time in which they wait."""
    packs = PackList.from_lists([list(pack) for step in steps for pack in step])
    seconds = costs.seconds(pack_loads(packs, sizes), LOADS)
    return wait(seconds.reshape(len(steps), -1, len(costs.parts)))


def bound(sizes: Sizes, llm_budget: int, costs: PackCosts, packs: int, ranks: int) -> float:
    """Share of the ranks' time that they wait at least, whoever makes so many packs; each rank runs the whole model."""
    (units,) = costs.parts.values()
    each = units["tiles"], units["tokens"]
    whole = least_of_whole_tiles(sizes.tiles, sizes.tokens, each, llm_budget, packs)
    return least_waiting(costs.of_samples(sizes, one_sum=True)[:, 0], packs, ranks, whole)


def dealt(packs: list[list[int]], ranks: int) -> Steps:
    """To ranks in turn; the last, too few for a step, are left out."""
    return [list(packs[at : at + ranks]) for at in range(0, len(packs) - ranks + 1, ranks)]


def by_buffers(sizes: Sizes, budgets: tuple[int, int], ranks: int) -> Steps:
    """Each rank reads every ranks-th sample, and packs what its buffer holds."""
    order, of_ranks = np.random.default_rng(0).permutation(len(sizes)), []
    for rank in range(ranks):
        mine = order[rank::ranks]
        buffers = [mine[at : at + BUFFER] for at in range(0, len(mine), BUFFER)]
        of_ranks.append([buffer[group].tolist() for buffer in buffers
                         for group in pack(sizes.tiles[buffer], sizes.tokens[buffer], *budgets)])  # fmt: skip
    return [list(step) for step in zip(*of_ranks, strict=False)]


def by_index(sizes: Sizes, budgets: tuple[int, int], ranks: int, costs: PackCosts) -> Steps:
    """What the packer orders for so many ranks."""
    pipeline = 1 if len(costs.parts) == 1 else 2
    options = PackOptions("balanced", *budgets, data_parallel_size=ranks, pipeline_model_parallel_size=pipeline)
    with tempfile.TemporaryDirectory() as folder:
        index, _ = build_index(sizes, Path(folder) / "index", options, costs=costs)
        chosen = epoch_iterations(PackStream(index, ranks, 1))
        return [[index.samples(int(number)).tolist() for number in step.ravel()] for step in chosen]


def compare(name: str, samples: int, ranks: int, python: str) -> list[dict[str, float]]:
    """Print a table of a corpus; return the share of time that each way waits: 2B, as a pipeline, 8B, as a pipeline."""
    sizes, budgets = corpus_of(name, samples)
    images = np.minimum(sizes.tiles * TOKENS_A_TILE[name], sizes.tokens).astype(int)
    question = Question(sizes.tokens.tolist(), sizes.tiles.tolist(), images.tolist(), budgets[1], budgets[0], BATCH,
                        ranks, 0)  # fmt: skip
    theirs = {way: found["steps"] for way, found in ask_peers(question, python)["ways"].items()}
    packed = {way: steps for way, steps in theirs.items() if steps and not way.startswith("Trainer")}
    by_tokens = [fullest(steps, sizes) for way, steps in packed.items() if not way.startswith("InternVL")]
    least = min(by_tokens, default=budgets[0])
    columns: list[dict[str, float]] = []
    bounds: list[str] = []
    for size in ("2b", "8b"):
        whole = PackCosts.of_model(f"{MODELS[name]}-{size}", "h100", *budgets)
        for costs in (one_part(whole), whole):
            together, at_theirs = (pack(sizes.tiles, sizes.tokens, tiles, budgets[1], costs=costs, seconds=1.0)
                                   for tiles in (budgets[0], least))  # fmt: skip
            ways = {**packed, BUFFERS: by_buffers(sizes, budgets, ranks), INDEX: by_index(sizes, budgets, ranks, costs),
                    TOGETHER: dealt(together, ranks), THEIR_TILES: dealt(at_theirs, ranks)}  # fmt: skip
            columns.append({way: waiting(steps, sizes, costs) for way, steps in ways.items() if steps})
            bounds.append("" if costs is whole else f"{bound(sizes, budgets[1], costs, len(together), ranks):.3f}")
    rows = [(way, sum(len(step) for step in ways[way]), f"{fullest(ways[way], sizes) / budgets[0]:.2f}",
             *(f"{column[way]:.3f}" for column in columns)) for way in columns[0]]  # fmt: skip
    rows.append((BOUND, "", "", *bounds))
    print_table(f"{name}: {len(sizes):,} samples, {budgets[0]:,} tiles and {budgets[1]:,} tokens, {ranks} ranks",
                ("", "packs", "tiles", "2B", "2B, pipeline", "8B", "8B, pipeline"), rows)  # fmt: skip
    return columns


def lead(column: dict[str, float]) -> float:
    """How much longer the best of the others waits than `pack`."""
    return min(share for way, share in column.items() if way not in OURS) / max(1e-9, column[TOGETHER])


def drawn(columns: list[dict[str, float]]) -> dict[str, float]:
    """What an 8B waits, by short names: the others' in their order, and what `omnibal pack` orders."""
    short = {way: way.partition(",")[0].partition("'")[0] for way in columns[2] if way not in OURS} | {INDEX: INDEX}
    return {name: columns[2][way] for way, name in short.items()}


def fullest(steps: Steps, sizes: Sizes) -> int:
    """Tiles of the fullest pack."""
    return max(int(sizes.tiles[list(pack)].sum()) for step in steps for pack in step)


def timed(name: str) -> tuple[str, ...]:
    """Milliseconds of `pack`, the least of five."""
    shown = []
    for count in TIMED:
        sizes, budgets = corpus_of(name, count)
        spent = []
        for _ in range(6):
            before = time.process_time()
            pack(sizes.tiles, sizes.tokens, *budgets)
            spent.append(time.process_time() - before)
        shown.append(f"{min(spent[1:]) * 1e3:.0f}")
    return (name, *shown)


def first_calls() -> str:
    """Seconds of a first call, by the processor: with nothing compiled, and in the next process."""
    code = """import time; from omnibal_ext.packing import pack; before = time.process_time()
pack([1, 0, 2] * 300, range(1, 901), 6, 1000); print(f"{time.process_time() - before:.1f}")"""
    with tempfile.TemporaryDirectory() as cache:
        where = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": str(Path(__file__).parents[1])}
        calls = [subprocess.run([sys.executable, "-c", code], env=where, capture_output=True, text=True, check=True)
                 for _ in range(2)]  # fmt: skip
    return " s on a machine, ".join(call.stdout.strip() for call in calls) + " s in a process"


def main() -> None:
    """Print the tables, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, help="where the peers are, or are to be installed")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512], help="data-parallel ranks")
    parser.add_argument("--samples", type=int, default=12_000)
    parser.add_argument("--corpora", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--picture", type=Path, help="SVG to write")
    arguments = parser.parse_args()
    python = python_of(arguments.environment) if arguments.environment else sys.executable
    print_table("milliseconds of pack", ("", *(f"{count:,} samples" for count in TIMED)), map(timed, arguments.corpora))
    print(f"first call: {first_calls()}")
    for ranks in arguments.ranks:
        found = {name: compare(name, arguments.samples, ranks, python) for name in arguments.corpora}
        ratios = [lead(column) for columns in found.values() for column in columns if {*column} - {*OURS}]
        if arguments.picture:
            from benchmarks.picture import write_bars

            write_bars(arguments.picture, {TITLES[name]: drawn(columns) for name, columns in found.items()}, INDEX)
        print(f"waiting at {ranks} ranks, the best of the others over ours, median: {median(ratios):.2f}x")


if __name__ == "__main__":
    run_tool(main)
