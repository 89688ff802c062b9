"""What samples cost in the batches of others: the same model trained on the same corpus, put together by each peer.

    python benchmarks/peers.py [--environment DIR] [--tokens 60000] [--ranks 4]

What goes together is the peers' own code: transformers' Trainer (random, group_by_length, batch_rebalance), TRL's
packer, ms-swift's, axolotl's, NeMo Automodel's, VeOmni's; and InternVL's two limits, written anew. With --environment
they are installed into a Python of their own at DIR, once; without, those are left out that are not here. All that
differs is what goes together: model, loss and step are ours, a step is a padded batch of 4 samples or a pack of at most
1600 tokens on each data-parallel rank. InternVL's way and ours know the budget of 9 tiles too.

The model has the cost ratios of InternViT-6B + InternLM2-20B, the samples the published shape (`end_to_end.py`). Each
way trains a model of its own, in turns with the others, on as many useful tokens (those of samples, without padding).
Seconds are the processor's, of the rank that takes most in a step: others wait for it, and what else runs on the
machine does not count. "waiting" is the share of the ranks' time in which they do. "loss" is that of held-out samples
after the last step. The last line is the ratio of useful tokens a second, ours over the best of the others.
"""

import argparse
import json
import site
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.end_to_end import A_BATCH, LLM_BUDGET, SHAPE, TILE_TOKENS, VIT_BUDGET, _content, _of_pack, corpus
from benchmarks.peer_orders import Question, Steps
from benchmarks.two_ranks import Case, Trained, profile, train
from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.output import say
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.dispatch import PackStream, epoch_iterations
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.plan import Plan
from omnibal_ext.sizes import Sizes

ORDERS = Path(__file__).with_name("peer_orders.py")
OURS = "ours, balanced"
SAMPLES, HELD_OUT = 4096, 24
"""Of the corpus that is packed, and behind it those that are only judged."""
WHOLE = ("trl", "datasets", "binpacking", "modelscope", "json_repair", "aiohttp", "lightning",
         "webdataset", "multi-storage-client", "rapidyaml", "s3fs", "mfusepy", "filetype", "click",  # Energon's
         "torchdata", "blobfile", "tiktoken", "timm", "wandb", "qwen-vl-utils")  # VeOmni's  # fmt: skip
ALONE = ("ms-swift", "axolotl", "megatron-energon", "megatron-bridge", "nemo-automodel", "veomni",
         "transformers==5.18.0")  # fmt: skip
"""Packages whose dependencies are not all needed, nor compatible with each other; what Automodel and VeOmni import."""


@dataclass(frozen=True)
class Row:
    """What training on a way's batches gave."""

    name: str
    tokens_per_second: float
    padding: float
    waiting: float
    most_tiles: int
    most_tokens: int
    loss: float


def python_of(environment: Path) -> str:
    """The Python of an environment with the peers; made where it is not there, on top of this one's packages."""
    python = environment / "bin/python"
    if not python.exists():
        venv.create(environment, with_pip=True)
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "ours.pth").write_text("\n".join(site.getsitepackages()))
        torch = f"torch=={version('torch').partition('+')[0]}"  # not what the newest torchvision wants
        for flags in ((*WHOLE, torch), ("--no-deps", *ALONE)):
            command = [str(python), "-m", "pip", "install", "--quiet", *flags]
            if subprocess.run(command, check=False).returncode:
                say(f"warning: {' '.join(flags)}: cannot all be installed", error=True)
    return str(python)


def ask_peers(question: Question, python: str) -> dict[str, Any]:
    """What `peer_orders.py` answers. Raises UserError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "question.json", Path(folder) / "answer.json"
        asked.write_text(json.dumps(asdict(question)))
        command = [python, "-W", "ignore", str(ORDERS), str(asked), str(answered)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not answered.exists():
            raise UserError(f"{python}: the peers do not answer: {done.stderr.strip().splitlines()[-1:]}; see {ORDERS}")
        answer: dict[str, Any] = json.loads(answered.read_text())
        return answer


def our_steps(sizes: Sizes, costs: PackCosts, ranks: int) -> Steps:
    """Balanced packs, in the order in which training runs them."""
    options = PackOptions("balanced", VIT_BUDGET, LLM_BUDGET, micro_batches=1, data_parallel_size=ranks)
    with tempfile.TemporaryDirectory() as folder:
        index, _ = build_index(sizes, Path(folder) / "index", options, costs=costs)
        chosen = epoch_iterations(PackStream(index, ranks, 1))
        return [[index.samples(int(pack)).tolist() for pack in step.ravel()] for step in chosen]


def of_tokens(steps: Steps, sizes: Sizes, tokens: int) -> Steps:
    """The first steps, of so many useful tokens; one more, which warms up, in front."""
    behind = np.cumsum([sum(int(sizes.tokens[sample]) for pack in step for sample in pack) for step in steps])
    return steps[: int(np.searchsorted(behind, tokens + behind[0])) + 1]


def cases_of(name: str, steps: Steps, sizes: Sizes, judged: Steps) -> list[Case]:
    """A step each, and behind them the held-out ones, whose loss is known before they are trained on."""
    plan = Plan.from_cuts(SHAPE.architecture.chain, ())
    padded = name.startswith("Trainer")
    cases = []
    for step, pads in [*((step, padded) for step in steps), *((step, False) for step in judged)]:
        packs = [np.array(pack, dtype=np.int64) for pack in step]
        filled = tuple(_of_pack(pack, sizes, pads) for pack in packs)
        cases.append(Case(name, plan, filled, tuple(_content(pack, sizes) for pack in packs)))
    return cases


def row_of(name: str, cases: Sequence[Case], trained: Sequence[Trained]) -> Row:
    """Of a way's steps, the first and the held-out one left out."""
    steps, work = cases[1:-1], np.array([one.work[0] for one in trained[1:-1]])
    useful = sum(tokens for case in steps for pack in case.contents for _, _, tokens in pack)
    run = [sum(lengths) for case in steps for _, lengths in case.packs]
    slowest = work.max(axis=1).sum()
    return Row(
        name,
        tokens_per_second=useful / slowest,
        padding=1 - useful / sum(run),
        waiting=1 - work.mean(axis=1).sum() / slowest,
        most_tiles=max(tiles for case in steps for tiles, _ in case.packs),
        most_tokens=max(run),
        loss=trained[-1].losses[0],
    )


def main() -> None:
    """Ask the peers, train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, help="where the peers are, or are to be installed")
    parser.add_argument("--tokens", type=int, default=60_000, help="useful tokens that each way trains on")
    parser.add_argument("--ranks", type=int, default=4, help="data-parallel ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments = parser.parse_args()
    ranks, whole = arguments.ranks, corpus(SAMPLES + HELD_OUT, arguments.seed)
    sizes = Sizes.from_arrays(whole.tiles[:SAMPLES], whole.tokens[:SAMPLES])
    question = Question(
        sizes.tokens.tolist(), sizes.tiles.tolist(), (TILE_TOKENS * sizes.tiles).tolist(), LLM_BUDGET, VIT_BUDGET,
        A_BATCH, ranks, arguments.seed,
    )  # fmt: skip
    python = python_of(arguments.environment) if arguments.environment else sys.executable
    answer = ask_peers(question, python)
    ways: dict[str, Steps] = {name: way["steps"] for name, way in answer["ways"].items()}
    ways[OURS] = our_steps(sizes, PackCosts.of_profile(profile(SHAPE)), ranks)
    judged = [[range(SAMPLES + rank, SAMPLES + HELD_OUT, ranks) for rank in range(ranks)]]
    cases = {name: cases_of(name, of_tokens(steps, sizes, arguments.tokens), whole, judged)
             for name, steps in ways.items()}  # fmt: skip
    every = [case for of_way in cases.values() for case in of_way]
    trained = iter(train(SHAPE, every, 1, warm_up=0, pipeline=1, ranks=ranks, count_bytes=False))
    rows = [row_of(name, of_way, [next(trained) for _ in of_way]) for name, of_way in cases.items()]
    show(rows, answer, arguments)


def show(rows: Sequence[Row], answer: dict[str, Any], arguments: argparse.Namespace) -> None:
    """The table, what was left out, and the ratio."""
    ours, best = rows[-1], max(rows[:-1], key=lambda row: row.tokens_per_second)
    ratio = ours.tokens_per_second / best.tokens_per_second
    if arguments.json:
        print_json({"rows": [asdict(row) for row in rows], "cut": answer.get("cut"), "ratio": ratio})
        return
    versions = {name: way["version"] for name, way in answer["ways"].items()}
    shown = [
        (row.name, versions.get(row.name, ""), f"{row.tokens_per_second:,.0f}",
         f"{row.tokens_per_second / ours.tokens_per_second:.3f}", f"{row.padding:.3f}", f"{row.waiting:.3f}",
         row.most_tiles, row.most_tokens, f"{row.loss:.3f}")
        for row in rows
    ]  # fmt: skip
    columns = ("", "version", "useful tokens/s", "of ours", "padding", "waiting", "most tiles", "most tokens", "loss")
    print_table(f"{arguments.tokens:,} useful tokens, {arguments.ranks} data-parallel ranks", columns, shown)
    if answer["missing"]:
        print(f"not installed here: {', '.join(answer['missing'])}; --environment DIR installs them there")
    if cut := answer.get("cut"):
        print(f"TRL's wrapped cuts {cut['samples']:,} of {SAMPLES:,} samples, {cut['images']:,} inside an image")
    print(f"ours / the best of the others ({best.name}), useful tokens a second: {ratio:.2f}x")


if __name__ == "__main__":
    run_tool(main)
