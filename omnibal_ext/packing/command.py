"""omnibal pack: its command line, and the work of settings that have the names of its flags."""

import argparse
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from omnibal_ext.architectures.presets import MODEL_FLAGS
from omnibal_ext.console import print_table
from omnibal_ext.errors import UserError
from omnibal_ext.files.folders import noted_path
from omnibal_ext.files.records import sha256_of, verify_checksums
from omnibal_ext.flags import FURTHER_BUDGETS, Interval, Need, ToolParser, add_further_budgets, flag_name
from omnibal_ext.modalities.modality import FURTHER, FURTHER_SIZES, budgets_in
from omnibal_ext.output import say
from omnibal_ext.packing.build import build_index, reject_reasons
from omnibal_ext.packing.corpus import DATASET_SOURCES, Corpus
from omnibal_ext.packing.costs import PackCosts, refuse_unpriced
from omnibal_ext.packing.held_out import HeldOut
from omnibal_ext.packing.index.histograms import bar_line, distributions, waste_by_kind
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.summary import Summary, shortfalls
from omnibal_ext.packing.options import LAST_ITERATION, METHODS, OVERSIZE, WAIT, PackOptions
from omnibal_ext.packing.packers.budgets import BudgetTrial, choose_budgets, further_budgets_for, read_budget
from omnibal_ext.packing.widths import NODE_RANKS, read_widths, widths_for
from omnibal_ext.profile_flags import profile_parser
from omnibal_ext.reading.document import read_json
from omnibal_ext.sizes import load_columns, sizes_files, sizes_hash

SHOWN_TRIALS = 3
SHOWN = (
    "samples", "packs", "lower_bound_packs", "vit_budget", "llm_budget", "iterations", "pad_ratio", "dist_ratio_vit",
    "dist_ratio_llm", "wait",
)  # fmt: skip
"""Measures in the printed table; `--json` and `--report` have all."""


@dataclass(frozen=True)
class Packed:
    """A packing: the index on disk, its corpus and measures, the budgets tried, and what it falls short of."""

    index: PackedIndex
    corpus: Corpus
    summary: Summary
    trials: list[BudgetTrial]
    faults: list[str]


def pack_and_show(is_quiet: bool, **given: Any) -> None:
    """Pack with these settings, all others as usual, and print the measures unless `is_quiet`."""
    parser = pack_parser()
    take_options(parser, given)
    packed = pack(parser.settings(**given))
    if not is_quiet:
        show(packed)


def take_options(parser: ToolParser, given: Mapping[str, Any]) -> None:
    """Make the options of the index of --like or --held-out-of the defaults of a command line."""
    if index := given.get("like") or given.get("held_out_of"):
        parser.set_defaults(**options_of(PackedIndex.open(index)))
    if given.get("held_out_of"):
        parser.set_defaults(narrow_first=0)  # an evaluation is one pass over all


def pack(arguments: argparse.Namespace) -> Packed:
    """Choose budgets, pack, write the index."""
    corpus, built_from = load_corpus(arguments)
    trials = settle_budgets(corpus, arguments)
    settle_further_budgets(corpus, arguments)
    settle_widths(corpus, arguments)
    options = PackOptions(**{field.name: getattr(arguments, field.name) for field in fields(PackOptions)})
    if arguments.max_rejects is not None:
        check_rejects(corpus, options, arguments.max_rejects)
    if not (arguments.costs or arguments.model or arguments.held_out_of):  # the order of held-out packs does not matter
        refuse_unpriced(corpus.sizes, options.all_budgets)
    costs = PackCosts.asked_for(arguments.costs, arguments.model, arguments.analytic, options.all_budgets)
    index, summary = build_index(corpus, arguments.output_dir, options, built_from, costs)
    faults = [] if arguments.held_out_of else shortfalls(summary, options)  # their order does not matter
    return Packed(index, corpus, summary, trials, faults)


def options_of(index: PackedIndex) -> dict[str, Any]:
    """Return the options that an index was packed with, by the names of the command line."""
    manifest = index.manifest
    options = {field.name: manifest[field.name] for field in fields(PackOptions) if field.name in manifest}
    options |= {"vit_budget": manifest["sample_vit_budget"], "llm_budget": manifest["sample_llm_budget"]}
    options["widths"] = tuple(manifest.get("widths", (1,)))
    options["budgets"] = list(manifest.get("budgets", {}).items())
    options["weights"] = [source["weight"] for source in manifest["sources"]]
    options["narrow_first"] = manifest.get("narrow_first", 0)
    options["held_out"] = manifest["built_from"].get("held_out", {}).get("share")
    group_by = manifest["built_from"].get("group_by")
    return options | ({"separate_sources": True} if group_by == "source" else {"group_by": group_by})


def load_corpus(arguments: argparse.Namespace) -> tuple[Corpus, dict[str, Any]]:
    """Return the corpus that flags describe, and a record of its files with hashes; makes --size's budgets a dict."""
    paths = [Path(arguments.data) / "sizes.npz"] if arguments.data else sizes_files(arguments.sizes)
    arguments.budgets = dict(arguments.budgets)
    more = tuple(dict.fromkeys((*arguments.budgets, *FURTHER_SIZES)))
    corpus = Corpus.of_dataset(arguments.data, more) if arguments.data else Corpus.load(paths, more)
    corpus = without_unused(corpus, arguments)
    if arguments.weights:
        corpus = corpus.weighted(arguments.weights)
    if arguments.separate_sources:
        corpus = replace(corpus, groups=corpus.source_numbers())
    elif arguments.group_by:
        columns = (load_columns(path, (arguments.group_by,))[0] for path in paths)
        corpus = corpus.grouped(chain.from_iterable(columns))
    held_out = HeldOut(arguments.held_out, arguments.seed) if arguments.held_out else None
    if arguments.held_out_of:
        held_out = HeldOut.left_out_by(PackedIndex.open(arguments.held_out_of))
    if held_out:
        corpus = held_out.of(corpus)
    read = ("tiles", "tokens", *more, arguments.group_by)
    built_from: dict[str, Any] = {
        "sizes": {noted_path(Path(arguments.output_dir).parent, path): sizes_hash(path, read) for path in paths},
        "group_by": "source" if arguments.separate_sources else arguments.group_by,
    }
    if held_out:
        built_from["held_out"] = held_out.to_record()
    if arguments.data:
        manifest = Path(arguments.data) / "manifest.json"
        content = read_json(manifest, DATASET_SOURCES, "preprocess again")
        sizes = {"sizes.npz": content.get("checksums", {}).get("sizes.npz", "")}
        verify_checksums(Path(arguments.data), sizes, "preprocess again")
        built_from["data"] = {"manifest_sha256": sha256_of(manifest), "manifest": content}
    return corpus, built_from


def without_unused(corpus: Corpus, arguments: argparse.Namespace) -> Corpus:
    """Return the corpus without further sizes that no sample has any of, unless --size names them. Raises UserError
    for a budget of these."""
    unused = corpus.sizes.more.keys() - corpus.sizes.without_unused().more.keys() - arguments.budgets.keys()
    for one in FURTHER:
        if one.size in unused and (budget := getattr(arguments, one.budget)):
            raise UserError(f"{flag_name(one.budget)} {budget}: no sample has {one.inputs}; leave it out")
    more = {name: values for name, values in corpus.sizes.more.items() if name not in unused}
    return replace(corpus, sizes=replace(corpus.sizes, more=more))


def settle_budgets(corpus: Corpus, arguments: argparse.Namespace) -> list[BudgetTrial]:
    """Set the budgets that are None in `arguments`; return the pairs tried, best first, none without a search."""
    if arguments.vit_budget is not None and arguments.llm_budget is not None:
        return []
    if len(corpus.sizes) == 0:
        raise UserError("the corpus has no samples")
    if arguments.method not in ("balanced", "isf"):  # no packs to fill: take every sample
        if arguments.vit_budget is None:
            arguments.vit_budget = int(corpus.sizes.tiles.max())
        if arguments.llm_budget is None:
            arguments.llm_budget = int(corpus.sizes.tokens.max())
        return []
    best, trials = choose_budgets(
        corpus.sizes,
        arguments.vit_budget,
        arguments.llm_budget,
        max_llm_budget=arguments.max_llm_budget,
        samples_per_pack=arguments.samples_per_pack,
        seed=arguments.seed,
    )
    arguments.vit_budget, arguments.llm_budget = best.vit_budget, best.llm_budget
    return trials


def settle_further_budgets(corpus: Corpus, arguments: argparse.Namespace) -> None:
    """Add --audio-budget and the like to `arguments.budgets`, unless there; the default follows from the tokens'."""
    found = further_budgets_for(corpus.sizes, arguments.llm_budget, budgets_in(vars(arguments)))
    arguments.budgets = {**arguments.budgets, **{size: n for size, n in found.items() if size not in arguments.budgets}}


def settle_widths(corpus: Corpus, arguments: argparse.Namespace) -> None:
    """Set `arguments.widths` for --widths auto (None): those that samples need."""
    if arguments.widths is None:
        budgets = PackOptions(
            vit_budget=arguments.vit_budget, llm_budget=arguments.llm_budget, budgets=arguments.budgets
        )
        arguments.widths = widths_for(corpus.sizes, budgets, arguments.data_parallel_size, arguments.node_ranks)


def check_rejects(corpus: Corpus, options: PackOptions, limit: int) -> None:
    """Raise UserError if more than `limit` samples would be left out, naming the first."""
    rejects = np.flatnonzero(reject_reasons(corpus.sizes, options) * (options.oversize == "reject"))
    if len(rejects) > limit:
        first = ", ".join(f"{name} {value}" for name, value in corpus.origin_of(int(rejects[0])).items())
        raise UserError(
            f"{len(rejects)} samples exceed {options.held} (the first: {first}), limit {limit} (--max-rejects): raise "
            "the budgets or the limit"
        )


def show(packed: Packed) -> None:
    """Print the measures and distributions as tables, and what the packing falls short of."""
    index, corpus, summary, trials = packed.index, packed.corpus, packed.summary, packed.trials
    if trials:
        columns = ("vit, llm budget", "packs / lower bound", "unused", "samples a pack")
        tried = [
            (f"{trial.vit_budget}, {trial.llm_budget}", *(round(value, 4) for value in astuple(trial)[2:]))
            for trial in trials[:SHOWN_TRIALS]
        ]
        print_table(f"Budgets tried ({len(trials)}), the first is taken", columns, tried)
    record = summary.to_record()
    names = (*SHOWN, *(name for one in summary.further for name in (one.budget, one.dist_ratio)))
    rows = [(name.replace("_", " "), shown(record[name])) for name in names]
    print_table(f"Packed index {index.folder}", ("measure (all: --json)", "value"), rows)
    distributed = [
        (title, bar_line(values), f"{values.min():,}", f"{values.mean():,.1f}", f"{values.max():,}")
        for title, values in distributions(index, corpus, summary)
    ]
    print_table("Sizes before and after", ("", "from least to most", "least", "mean", "most"), distributed)
    waste = [(kind, f"{share:.2%}") for kind, share in waste_by_kind(summary)]
    print_table("Waste by kind", ("kind", "share"), waste)
    print_table("Sources", tuple(summary.sources[0]), [tuple(source.values()) for source in summary.sources])
    if summary.rejected_by_reason:
        print_table("Left out, see rejected.jsonl", ("reason", "samples"), summary.rejected_by_reason.items())
    compiled = f", and {summary.compile_seconds:.1f} s of compiling, once a machine" if summary.compile_seconds else ""
    say(f"packed in {summary.seconds:.1f} s, {summary.samples_per_second:,.0f} samples a second{compiled}")
    if packed.faults:
        say(*packed.faults)


def shown(value: float) -> str:
    """Return a number as text with commas, floats with four decimals."""
    return f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"


def named_budget(text: str) -> tuple[str, int]:
    """Read --size NAME=BUDGET as (name, budget). Raises ArgumentTypeError for a budget below 0."""
    name, _, number = text.partition("=")
    if int(number) < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0, which is no limit")
    return name, int(number)


def widths(text: str) -> tuple[int, ...] | None:
    """Read `1,2,4`, or "auto" (None), under the name that argparse quotes."""
    return read_widths(text)


NUMBERS = (
    Interval("(0, 1e6]", "weights"),
    Interval("[0, 1e9]", "vit_budget"),
    Interval("[1, 1e9]", f"llm_budget max_llm_budget {FURTHER_BUDGETS} samples_per_pack"),
    Interval("[0, inf)", "max_rejects narrow_first"),
    Interval("[1, 65536]", "data_parallel_size micro_batches pipeline_model_parallel_size node_ranks"),
    Interval("[1, 10000]", "epochs"),
    Interval("[0, 1e6]", "seconds"),
    Interval("[0, 1)", "wait"),
    Interval("(0, 1)", "held_out"),
    Interval("[0, 4294967295]", "seed"),
)
NEEDS = (
    Need(
        "max_llm_budget",
        "--llm-budget auto, and --method balanced or isf",
        lambda given: given.llm_budget in (None, "auto") and given.method in ("balanced", "isf"),
    ),
    Need(
        "held_out like",
        "to be given without --held-out-of, whose index determines samples and packing",
        lambda given: not given.held_out_of,
    ),
    Need("narrow_first", "--widths auto or of several ranks", lambda given: given.widths != (1,)),
    Need("node_ranks", "--widths auto", lambda given: given.widths is None),
    Need("analytic model", "to be given without --costs, which has the seconds", lambda given: not given.costs),
)


def pack_parser(description: str | None = None) -> ToolParser:
    """Return the command line of omnibal pack."""
    parser = ToolParser(
        numbers=NUMBERS, needs=NEEDS, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    corpus = parser.add_argument_group("corpus")
    add = corpus.add_mutually_exclusive_group(required=True).add_argument
    add("--data", metavar="FOLDER", help="a dataset folder of omnibal preprocess")
    add("--sizes", nargs="+", metavar="FILE", help="sizes, .json, .npz or a folder of .npy; several are one corpus")
    add(
        "--why", metavar="SAMPLE",
        help="pack nothing: say why this sample of the index at --output-dir is in its pack; a number, or SOURCE:ROW",
    )  # fmt: skip
    corpus.add_argument("--weights", nargs="+", type=float, help="times an epoch sees each input file")
    corpus.add_argument("--held-out", type=float, metavar="SHARE", help="leave these samples out, drawn by --seed")
    corpus.add_argument("--held-out-of", metavar="INDEX", help="pack those that this index left out, each once")
    add = corpus.add_mutually_exclusive_group().add_argument
    add("--separate-sources", action="store_true", help="no pack has samples of two input files")
    add("--group-by", metavar="FIELD", help="no pack has samples that differ in this field of --sizes")
    add = parser.add_argument_group("packing").add_argument
    add("--method", choices=METHODS, default=METHODS[0])
    add("--vit-budget", type=read_budget, default="auto", metavar="TILES", help="most tiles of a pack")
    add("--llm-budget", type=read_budget, default="auto", metavar="TOKENS", help="most tokens of a pack")
    add_further_budgets(add, "most {units} of a pack, if there are {inputs} (default: auto)")
    add(
        "--size", dest="budgets", action="append", default=[], type=named_budget, metavar="NAME=BUDGET",
        help="a further size of samples, an array or field of that name (again for more); 0: no limit",
    )  # fmt: skip
    add("--max-llm-budget", type=int, metavar="TOKENS", help="limit of --llm-budget auto")
    add("--samples-per-pack", type=int, default=4, help="of methods that pad; what auto aims at")
    add(
        "--widths", type=widths, default="1", metavar="W,W...",
        help="ranks that may run a pack together, with as many times the budgets: 1,2,4,8, or auto: as samples need",
    )  # fmt: skip
    add(
        "--node-ranks", type=int, default=NODE_RANKS, metavar="D",
        help="of a node, which no team of --widths auto leaves: its GPUs over the tensor-parallel size",
    )  # fmt: skip
    add("--oversize", choices=OVERSIZE, default=OVERSIZE[0], help="samples over budget")
    add("--max-rejects", type=int, metavar="N", help="fail if more samples than N are left out")
    group = parser.add_argument_group("iterations")
    parser.borrow(group, profile_parser(), ("data_parallel_size",))
    add = group.add_argument
    add("--micro-batches", type=int, default=1, metavar="M", help="packs of a rank an iteration")
    add("--narrow-first", type=int, default=0, metavar="N", help="iterations of packs of one rank before all others")
    add("--last-iteration", choices=LAST_ITERATION, default=LAST_ITERATION[0], help="what fills it")
    add("--epochs", type=int, help="epochs packed apart; training repeats them (default: as fractional weights need)")
    add("--pipeline-model-parallel-size", type=int, metavar="P", help="1: seconds of vision and language part add up")
    add(
        "--wait", type=float, default=WAIT, metavar="SHARE",
        help="of device time that ranks may spend waiting; more of it lets iterations look more like the corpus",
    )  # fmt: skip
    add(
        "--seconds", type=float, default=1.0,
        help="nominal time for evening, and for mixing iterations; of each 65,536 packs",
    )  # fmt: skip
    add = parser.add_argument_group("costs, by which ranks are balanced").add_argument
    add("--costs", metavar="PROFILE", help="a profile.json of omnibal profile")
    add("--analytic", metavar="DEVICE", help="or count the operations of --model on an a100, h100 or h200")
    add(*MODEL_FLAGS, help="a preset or a Hugging Face folder, for --analytic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--like", metavar="INDEX", help="take options not given from this packed index")
    parser.add_argument("--output-dir", required=True, help="the packed index to write")
    parser.add_argument("--report", metavar="FILE", help="write histograms and measures as an HTML page")
    parser.add_argument("--dump-iterations", metavar="FILE", help="write epoch 0: pack numbers [iterations, D, M]")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser
