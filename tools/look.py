"""What does a run lose to padding and waiting? Batches as other trainers make them, next to balanced packs.

    omnibal look sizes.npz --tokens 16384 --ranks 8,64
    omnibal look chat.jsonl --model HF_FOLDER --image-root images --tokens 16384 --workers 8

From sizes alone, or from conversations with the tokenizer and the image processor of a model's folder. Needs no GPU and
no weights, and writes nothing unless asked to. A batch is what one device runs at once; docs/look.md explains the
table.
"""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from omnibal_ext.architectures.presets import MODEL_FLAGS, check_is_folder
from omnibal_ext.console import print_json, print_table, say_wrapped, track
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.files.folders import check_exists
from omnibal_ext.files.records import write_text
from omnibal_ext.flags import OF_FILES, Interval, Need, ToolParser, flag_name, given_of
from omnibal_ext.launch.weights import downloaded
from omnibal_ext.modalities.modality import FURTHER_SIZES, in_words
from omnibal_ext.output import say
from omnibal_ext.packing.build import reject_reasons
from omnibal_ext.packing.command import pack_parser
from omnibal_ext.packing.comparison import Batching, Order, measure, ways
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts, refuse_unpriced
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packers.budgets import choose_budgets, further_budgets_for
from omnibal_ext.preprocess_flags import preprocess_parser
from omnibal_ext.reading.files import open_plain
from omnibal_ext.reading.stores import StorePath, located
from omnibal_ext.report.page import comparison_page
from omnibal_ext.sizes import sizes_files

RANKS, BATCH = [8], [4]
"""Defaults: data-parallel ranks, and samples of a padded batch, and of a pack without --tokens."""
NEXT = "to make balanced packs (in ms-swift, Energon, TRL and others: docs/integrations.md; your loop: docs/loops.md):"
YOURS = (
    "which is yours: batches of most trainers are random, with group_by_length of similar length; ms-swift and axolotl "
    "(TRL: of text) pack by tokens, InternVL by tokens and tiles"
)


def is_sizes(path: Path) -> bool:
    """Say whether a path has sizes, not conversations: an .npz, a folder of .npy, a .json with their fields."""
    if path.suffix == ".json" and path.is_file():
        with open_plain(path, "see that it is there") as file:
            head = file.read(2**12)
        return b'"token_num"' in head or b'"token_lengths"' in head
    return path.suffix == ".npz" or (path / "tokens.npy").is_file()


MEASURED = ("image_root", "max_tiles", "max_pixels", "max_rejects", "workers")
"""Settings of omnibal preprocess by which conversations are measured."""
NUMBERS = (
    Interval("[1, 1e9]", "tokens"),
    Interval("[0, 1e9]", "tiles"),
    Interval("[1, 65536]", "ranks batch"),
)
NEEDS = (
    Need(
        " ".join((*MEASURED, "save_sizes")),
        "conversations, and --model",
        lambda given: given.model and not all(map(is_sizes, given.input)),
    ),
    Need("download", "--model", lambda given: given.model),
    Need("save_sizes", "a name that ends in .npz", lambda given: given.save_sizes.suffix == ".npz"),
    Need("max_pixels", "to be given without --max-tiles", lambda given: given.max_tiles is None),
    Need("micro_batches", "to be given without --order, which has them", lambda given: not given.order),
    Need("order_packed", "--order", lambda given: given.order),
    Need("analytic", "to be given without --costs, which has the seconds", lambda given: not given.costs),
)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _parser() -> ToolParser:
    parser = ToolParser(
        numbers=NUMBERS, needs=NEEDS, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "input", nargs="+", type=located,
        help="sizes (.npz or folder of .npy of tiles and tokens, or a .json list), a dataset folder of omnibal "
        "preprocess, or with --model conversations: JSONL, JSON lists, tables, tars (docs/data.md)",
    )  # fmt: skip
    group = parser.add_argument_group("conversations")
    add = group.add_argument
    add(*MODEL_FLAGS, help="a Hugging Face folder (no weights needed) or a preset; counts its costs too")
    add("--download", action="store_true", help="fetch --model OWNER/MODEL of the Hugging Face hub, without weights")
    parser.borrow(group, preprocess_parser(), MEASURED)
    add("--save-sizes", type=Path, metavar="FILE.npz", help="write the sizes, to look again in seconds")
    group = parser.add_argument_group("your run")
    add = group.add_argument
    add("--tokens", type=int, metavar="T", help="most tokens of a pack, packing_length (default: of four)")
    add("--tiles", type=int, metavar="T", help="most tiles of a pack (default: as its tokens have)")
    add("--batch", type=_numbers, default=BATCH, metavar="B,...", help="samples of a padded batch (default 4)")
    add("--ranks", type=_numbers, metavar="D,...", help="data-parallel ranks (default: 8, or the order's)")
    sizes = ("micro_batches", "pipeline_model_parallel_size")
    parser.borrow(group, pack_parser(), sizes, pipeline_model_parallel_size={"default": 1})
    add("--order", metavar="FILE.jsonl", help="your own sampler's batches, a step a line: docs/look.md")
    add("--order-packed", action="store_true", help="its batches are packed, not padded")
    group = parser.add_argument_group("costs of tiles and tokens, by which time is counted")
    parser.borrow(group, pack_parser(), ("costs", "analytic"))
    parser.borrow(parser, pack_parser(), ("seed",))
    parser.add_argument("--report", metavar="FILE", type=Path, help="write the table as an HTML page")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


class Input(NamedTuple):
    """A corpus, the flags by which `omnibal pack` reads it, and what was said of lines that cannot be used."""

    corpus: Corpus
    flags: Sequence[str]
    rejected: str = ""
    has_dataset: bool = True
    """Whether what `flags` name is there; conversations become a dataset first."""


def read_input(arguments: argparse.Namespace) -> Input:
    """Read sizes, or measure conversations and write --save-sizes. Raises UserError for these without --model, and for
    sizes and datasets in a store."""
    paths: list[Path] = arguments.input
    for path in paths:
        if isinstance(path, StorePath) and (is_sizes(path) or (path / "sizes.npz").exists()):
            raise UserError(f"{path}: are sizes, and only conversations are read from a store: {OF_FILES}; copy it")
    names = [str(path) for path in paths]
    if all(is_sizes(path) for path in paths):
        return Input(Corpus.load(sizes_files(paths), FURTHER_SIZES).in_memory(), ["--sizes", *names])
    if len(paths) == 1 and (paths[0] / "sizes.npz").exists():
        return Input(Corpus.of_dataset(paths[0], FURTHER_SIZES), ["--data", *names])
    for path in paths:
        check_exists(path)
    if not arguments.model or any(map(is_sizes, paths)):
        wrong = next(path for path in paths if not is_sizes(path))
        raise UserError(
            f"{wrong}: is no file of sizes (.npz or folder of .npy of tiles and tokens, or a JSON list of vit_num and "
            "token_num); conversations are read with --model FOLDER, a Hugging Face folder, and apart from sizes"
        )
    corpus, rejected = _measured(arguments)
    if arguments.save_sizes:
        corpus.sizes.save(arguments.save_sizes)
    return Input(corpus, ["--data", "data"], rejected, has_dataset=False)


def _measured(arguments: argparse.Namespace) -> tuple[Corpus, str]:
    """Measure conversations: return their corpus, and which lines were rejected."""
    from megatron.vlm.preprocessing.model_recipe import check_tokenizer, recipe_of, resolve_settings, with_pixels
    from megatron.vlm.preprocessing.preprocess import measure as measure_inputs
    from megatron.vlm.preprocessing.samples import open_recipe

    check_is_folder(arguments.model, "conversations need")
    choices = resolve_settings({"max-tiles": arguments.max_tiles}, arguments.model)
    recipe = recipe_of(
        with_pixels(choices, arguments.max_pixels), image_root=arguments.image_root, image_checksums=False
    )
    check_tokenizer(open_recipe(recipe), arguments.model)
    corpus, rejects = measure_inputs(arguments.input, recipe, arguments.workers, arguments.max_rejects)
    return corpus, rejects.describe() if rejects.total else ""


class Comparison(NamedTuple):
    """Ways of batching: the user's own order first if there is one, balanced packs last."""

    options: PackOptions
    costs: PackCosts
    ranks: Sequence[int]
    ways: Sequence[Batching]
    said: Sequence[str]
    """What the user's order loses on the first number of ranks, or else random batches and packs by tokens."""


def compare(given: Input, arguments: argparse.Namespace) -> Comparison:
    """Choose budgets, pack the samples in each of `ways` (padded, by tokens, balanced), compare waits and padding.
    Includes the batches of --order, if given."""
    corpus = replace(given.corpus, sizes=given.corpus.sizes.without_unused())
    order = Order.read(arguments.order, len(corpus.sizes)) if arguments.order else None
    if order and given.rejected:
        raise UserError(
            f"--order numbers all conversations from 0, but some cannot be used ({given.rejected}): take them out of "
            "the input, or look without --order"
        )
    budgets, _ = choose_budgets(
        corpus.sizes, arguments.tiles, arguments.tokens, samples_per_pack=BATCH[0], seed=arguments.seed
    )
    ranks, micro_batches = order.iterations.shape[1:] if order else (RANKS[0], arguments.micro_batches)
    asked = list(dict.fromkeys([ranks, *(arguments.ranks or [])] if order else arguments.ranks or RANKS))
    options = PackOptions(
        vit_budget=budgets.vit_budget, llm_budget=budgets.llm_budget,
        budgets=further_budgets_for(corpus.sizes, budgets.llm_budget), micro_batches=micro_batches,
        pipeline_model_parallel_size=arguments.pipeline_model_parallel_size, seed=arguments.seed,
    )  # fmt: skip
    if not (arguments.costs or arguments.model):
        refuse_unpriced(corpus.sizes, options.all_budgets)
    costs = PackCosts.asked_for(arguments.costs, arguments.model, arguments.analytic, options.all_budgets)
    others = ways(options, arguments.batch)
    measured = [measure(corpus, way, asked, costs) for way in track(others, "compare", total=len(others))]
    sides = [measured[0], measured[-3]]
    if order:
        sides = [order.measure("your order", corpus.sizes, not arguments.order_packed, costs, options.one_sum)]
        measured = [*sides, *measured]
    return Comparison(options, costs, asked, measured, [one.against(measured[-1], asked[0]) for one in sides])


Rows = list[tuple[str, ...]]


def table(found: Comparison) -> tuple[list[str], Rows]:
    """Return columns and rows for people: the batches, then their steps on each number of ranks."""
    columns, rows = batches(found)
    for ranks in found.ranks:
        more, cells = steps(found, ranks)
        columns, rows = columns + more, [(*row, *cell) for row, cell in zip(rows, cells, strict=True)]
    return columns, rows


def batches(found: Comparison) -> tuple[list[str], Rows]:
    """Return columns and rows of what does not depend on the number of ranks."""
    rows: Rows = [
        (way.name, f"{way.samples_per_batch:.1f}", f"{way.padding:.1%}", f"{way.most_tiles:,}", f"{way.most_tokens:,}")
        for way in found.ways
    ]
    return ["a device's batch", "samples", "padding", "most tiles", "most tokens"], rows


def steps(found: Comparison, ranks: int) -> tuple[list[str], Rows]:
    """Return the columns and rows of a number of ranks; cells are empty for an order made for another number."""
    best = found.ways[-1].on_ranks[ranks]
    each = (way.on_ranks.get(ranks) for way in found.ways)
    rows: Rows = [
        (f"{one.steps:,}", f"{one.wait:.1%}", f"{one.seconds / best.seconds:.2f}") if one else ("", "", "")
        for one in each
    ]
    return [f"steps on {ranks}", "waiting", "time"], rows


def next_commands(given: Input, found: Comparison, arguments: argparse.Namespace) -> list[str]:
    """Return the commands that make the balanced packs of the table."""
    options, commands = found.options, []
    model = ["--model", arguments.model] if arguments.model else []
    if not given.has_dataset:
        limits = given_of(arguments, MEASURED).items()
        chosen = [word for name, value in limits for word in (flag_name(name), str(value))]
        commands.append(
            ["omnibal", "preprocess", "--input", *map(str, arguments.input), *model, *chosen, "--output-dir", "data"]
        )
    priced = ["--costs", arguments.costs] if arguments.costs else model
    if arguments.analytic:
        priced = [*priced, "--analytic", arguments.analytic]
    commands.append([
        "omnibal", "pack", *given.flags,
        "--llm-budget", str(options.llm_budget), "--vit-budget", str(options.vit_budget),
        "--data-parallel-size", str(found.ranks[0]), "--micro-batches", str(options.micro_batches),
        "--pipeline-model-parallel-size", str(options.pipeline_model_parallel_size), *priced,
        "--seed", str(options.seed), "--output-dir", "packs",
    ])  # fmt: skip
    return [shlex.join(command) for command in commands]


def about(given: Input, found: Comparison) -> tuple[str, list[str]]:
    """Return the table's title, and what is to be known about it."""
    options, samples = found.options, len(given.corpus.sizes)
    title = f"{samples:,} samples; packs of at most {options.llm_budget:,} tokens and {options.vit_budget:,} tiles"
    title += f", {in_words(options.budgets)}" if options.budgets else ""
    notes = [f"time: device seconds a sample, balanced packs = 1, by the costs of {found.costs.origin}", YOURS]
    if left_out := _left_out(given, found):
        notes.append(f"{left_out:,} samples ({left_out / samples:.1%}) exceed these limits: in no batch but --order's")
    if (batches := samples / found.ways[-1].samples_per_batch) < max(found.ranks) * options.micro_batches:
        notes.append(f"{batches:.0f} balanced packs are fewer than a step has: too few samples to see who waits")
    if given.rejected:
        notes.append(f"lines that cannot be used: {given.rejected}")
    return title, notes


def _left_out(given: Input, found: Comparison) -> int:
    return int((reject_reasons(given.corpus.sizes, found.options) > 0).sum())


def main() -> None:
    """Run omnibal look: read sizes or conversations, compare ways to batch them, print a table."""
    arguments = _parser().parse_args()
    if arguments.download:
        arguments.model = downloaded(arguments.model, arguments.json, weights=False)
    given = read_input(arguments)
    found = compare(given, arguments)
    (title, notes), commands = about(given, found), next_commands(given, found, arguments)
    if arguments.report:
        at, best = found.ranks[0], found.ways[-1]
        times = [(way.name, way.on_ranks[at].seconds / best.on_ranks[at].seconds) for way in found.ways]
        write_text(arguments.report, comparison_page(title, *table(found), times, [*found.said, *notes], commands))
    if arguments.json:
        print_json(as_record(given, found, commands))
        return
    columns, rows = batches(found)
    print_table(title, columns, rows)
    for ranks in found.ranks:
        more, cells = steps(found, ranks)
        named = [(row[0], *cell) for row, cell in zip(rows, cells, strict=True)]
        print_table(f"{ranks} data-parallel ranks", [columns[0], *more], named)
    say_wrapped(*notes, "", *found.said, "", NEXT)
    say(*commands)


def as_record(given: Input, found: Comparison, commands: Sequence[str]) -> dict[str, Any]:
    """Return the object that --json prints."""
    return {
        "samples": len(given.corpus.sizes),
        "left_out": _left_out(given, found),
        "rejected": given.rejected,
        **{name: getattr(found.options, name) for name in ("llm_budget", "vit_budget", "micro_batches")},
        "costs": found.costs.origin,
        "ways": [asdict(way) for way in found.ways],
        "said": found.said,
        "commands": list(commands),
    }


if __name__ == "__main__":
    run_tool(main)
