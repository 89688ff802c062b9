"""omnibal plan: its command line, and the work of settings that have the names of its flags."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omnibal_ext.architectures.presets import MODEL_FLAGS
from omnibal_ext.chain import layer_names
from omnibal_ext.console import print_table
from omnibal_ext.costs.analytic import DEVICES
from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError
from omnibal_ext.flags import FURTHER_BUDGETS, Interval, Need, ToolParser, add_further_budgets
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import METHODS, RECOMPUTE_RULES, make_plan
from omnibal_ext.layout.tower_layout import TOWER_LAYOUTS, plan_tower
from omnibal_ext.layout.workload import packs_of_index
from omnibal_ext.output import say
from omnibal_ext.packing.command import pack_parser
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.plan import Plan, StagePlan, layer_ranges
from omnibal_ext.plan_tower import Tower, choice_in_words, tower_layout
from omnibal_ext.schedules.schedule import OFFERED, offered
from omnibal_ext.units import GIB, in_bytes


def plan_and_show(is_quiet: bool, profile: Path, output: Path, **given: Any) -> None:
    """Plan with these settings, all others as usual, write the plan, and print it unless `is_quiet`."""
    settings = plan_parser().settings(profile=profile, output=output, **given)
    plan = planned(Profile.load(profile), settings)
    plan.save(output)
    if not is_quiet:
        print_plan(plan)


def planned(profile: Profile, arguments: argparse.Namespace) -> Plan:
    """Plan a run of this profile, on the packs of an index if one is named."""
    if arguments.num_microbatches == 1 and arguments.pipeline_model_parallel_size > 1:
        raise UserError(
            f"one microbatch keeps one of {arguments.pipeline_model_parallel_size} pipeline ranks busy at a time: "
            "raise --num-microbatches, or use --pipeline-model-parallel-size 1"
        )
    packs = None
    if arguments.packs:
        index = PackedIndex.open(arguments.packs)
        packs = packs_of_index(index, profile, arguments.num_microbatches, arguments.pack_iterations)
    problem = LayoutProblem(
        profile,
        arguments.pipeline_model_parallel_size,
        arguments.num_microbatches,
        arguments.virtual_pipeline_model_parallel_size,
        arguments.schedule,
        arguments.memory_gib * GIB,
        packs,
    )
    problem, candidates, said = plan_tower(
        problem,
        arguments.tower,
        arguments.method,
        recompute=arguments.recompute,
        radius=arguments.radius,
        top_k=arguments.top_k,
        seconds=arguments.seconds,
    )
    plan = make_plan(problem, candidates, arguments.method)
    return replace(plan, predicted=plan.predicted | said)


def _recomputed(names: Sequence[str], stage: StagePlan) -> str:
    """List the layers recomputed entirely, and those of which only norms and activation functions are ("cheap")."""
    cheap = layer_ranges(names, stage.recompute_cheap)
    return ", ".join(filter(None, (layer_ranges(names, stage.recompute), cheap and f"cheap: {cheap}"))) or "-"


def print_plan(plan: Plan) -> None:
    """Print a table with a row a stage, the next-best layouts, and the distance from the ideal step."""
    predicted, names = plan.predicted, layer_names(plan.chain)
    rows: list[tuple[Any, ...]] = []
    for number, stage in enumerate(plan.stages):
        rank, chunk = plan.placement.rank_and_chunk(number)
        where = f"rank {rank}" + (f" chunk {chunk}" if plan.virtual_pipeline_model_parallel_size > 1 else "")
        rows.append(
            (
                where,
                layer_ranges(names, range(*stage.layers)),
                _recomputed(names, stage),
                f"{predicted['stage_forward_seconds'][number] * 1e3:.2f}",
                f"{predicted['stage_backward_seconds'][number] * 1e3:.2f}",
                in_bytes(predicted["stage_peak_bytes"][rank]),
                predicted["stage_limit"][number],
            )
        )
    if plan.tower:
        rows.append(_tower_row(plan, plan.tower))
    title = f"{plan.model or 'model'}: {plan.method}, {plan.schedule}, {plan.num_microbatches} microbatches"
    print_table(title, ("stage", "layers", "recomputed", "forward ms", "backward ms", "on a rank", "limit"), rows)
    if plan.alternatives:
        print_table(
            "next best",
            ("layers a stage", "step ms", "why it lost"),
            [
                (
                    ", ".join(str(s["layers"][1] - s["layers"][0]) for s in other["stages"]),
                    f"{other['step_seconds'] * 1e3:.2f}",
                    other["why"],
                )
                for other in plan.alternatives
            ],
        )
    say(
        f"step {predicted['step_seconds'] * 1e3:.2f} ms, bubble {predicted['bubble_fraction']:.1%}, "
        f"{predicted['fraction_of_ideal']:.1%} of the ideal {predicted['ideal_seconds'] * 1e3:.2f} ms"
    )
    if "tower" in predicted:
        say(f"vision tower: {choice_in_words(predicted['tower'], plan.tower)}")


def _tower_row(plan: Plan, tower: Tower) -> tuple[str, ...]:
    """Return the replicated tower, as a row among the stages."""
    names = layer_names(plan.chain)
    recomputed = layer_ranges(names, tower.recompute) or "-"
    forward, backward = (f"{seconds * 1e3:.2f}" for seconds in plan.predicted["tower_seconds"])
    return f"beside, {tower.mode}", layer_ranges(names, range(tower.layers)), recomputed, forward, backward, "", ""


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _budgets(text: str) -> list[tuple[int, int]]:
    pairs = [word.split("x") for word in text.split(",")]
    found = [(int(tiles), int(tokens)) for tiles, tokens in pairs]
    if any(tiles < 0 or tokens < 1 for tiles, tokens in found):
        raise argparse.ArgumentTypeError(f"{text}: tiles must be at least 0, tokens at least 1")
    return found


def _schedules(text: str) -> list[str]:
    return [offered(word) for word in text.split(",")]


NUMBERS = (
    Interval("[1, 16384]", "pipeline_model_parallel_size virtual_pipeline_model_parallel_size"),
    Interval("[1, 16384]", "tensor_sizes expert_sizes pipeline_sizes chunks"),
    Interval("[1, 1e6]", "num_microbatches pack_iterations gpus"),
    Interval("[1, 1e9]", f"global_batch_samples {FURTHER_BUDGETS}"),
    Interval("[1, 10000]", "top_k"),
    Interval("[0, 10000]", "radius"),
    Interval("(0, inf]", "memory_gib"),
    Interval("[0, 1e6]", "seconds"),
)
NEEDS = (
    Need("gpus global_batch_samples sizes pipeline_sizes chunks schedules", "--sweep", lambda given: given.sweep),
    Need(
        """
        pipeline_model_parallel_size virtual_pipeline_model_parallel_size num_microbatches schedule packs recompute
        tower
        """,
        "to be given without --sweep, which chooses",
        lambda given: not given.sweep,
    ),
    Need("pack_iterations", "--packs", lambda given: given.packs),
    Need("radius", "--method bmp or joint", lambda given: given.method in ("bmp", "joint")),
    Need("model budgets tensor_sizes expert_sizes", "--analytic", lambda given: given.analytic),
    Need("analytic", "to be given without --profile, which has the costs", lambda given: not given.profile),
    Need("analytic", "--model", lambda given: given.model),
    Need("analytic", "--budgets, or --sweep to try some", lambda given: given.budgets or given.sweep),
)


def plan_parser(description: str | None = None) -> ToolParser:
    """Return the command line of omnibal plan."""
    parser = ToolParser(
        numbers=NUMBERS, needs=NEEDS, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--profile", help="profile.json of omnibal profile")
    ranks = {"help": "pipeline ranks"}
    parser.borrow(parser, pack_parser(), ("pipeline_model_parallel_size",), pipeline_model_parallel_size=ranks)
    add("--virtual-pipeline-model-parallel-size", type=int, default=1, help="chunks a rank (1: none)")
    add("--num-microbatches", type=int, help="microbatches a data-parallel rank and step")
    add("--memory-gib", type=float, default=float("inf"), help="of one rank; no limit unless given")
    add("--method", choices=METHODS, default=METHODS[-1], help="how to cut")
    add(
        "--recompute", choices=tuple(RECOMPUTE_RULES), default="fewest", help="the fewest layers that fit, or every one"
    )
    add(
        "--schedule", type=offered, choices=OFFERED, default="1f1b",
        help="order of forwards and backwards; zb_auto, zb_v_auto: lists of its own",
    )  # fmt: skip
    add(
        "--tower", type=tower_layout, choices=TOWER_LAYOUTS, default="cut",
        help="encoders: cut into stages as all of the chain, whole on every rank beside the pipeline, or auto",
    )  # fmt: skip
    add("--packs", help="packed index: judge layouts on the packs that training will run")
    add("--pack-iterations", type=int, default=4, help="how many iterations of them")
    add(
        "--seconds", type=float, default=4.0, help="work to search layouts, and again lists, in seconds of an idle core"
    )
    add("--radius", type=int, default=1, help="bmp: how many layers each cut may move from the anchor")
    add("--top-k", type=int, default=10, help="how many layouts are kept")
    add = parser.add_argument_group("sweep: choose budgets, parallel sizes, microbatches and schedule too").add_argument
    add("--sweep", action="store_true", help="rank settings by predicted samples a second, plan the best")
    add("--gpus", type=int, help="how many there are")
    add("--global-batch-samples", type=int, help="samples of an iteration, over all ranks")
    add("--sizes", nargs="+", help="sizes of the samples (.json, .npz or a folder of .npy)")
    add("--analytic", choices=tuple(DEVICES), help="price any setting on this device, without --profile")
    add(*MODEL_FLAGS, help="preset to price with --analytic")
    add("--budgets", type=_budgets, help="TILESxTOKENS,... with --analytic; a sweep without them tries those that fit")
    add_further_budgets(
        add,
        "with --analytic: {units} of a pack, for models that {verb}; a sweep without it tries, with each budget of "
        "tokens, what these bring",
    )
    add("--tensor-sizes", type=_numbers, default=[1, 2, 4, 8], help="with --analytic")
    add("--expert-sizes", type=_numbers, default=[1], help="with --analytic: ranks that experts lie on")
    add("--pipeline-sizes", type=_numbers, default=[1, 2, 4, 8])
    add("--chunks", type=_numbers, default=[1, 2])
    add("--schedules", type=_schedules, default=["1f1b"], help="names, comma between")
    parser.add_argument("--output", required=True, help="plan.json to write")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    return parser
