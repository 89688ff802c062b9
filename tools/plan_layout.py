"""Choose where to cut the model and what to recompute; write plan.json.

    python tools/plan_layout.py --profile profile.json --pipeline-model-parallel-size 4 --num-microbatches 8 \\
        --memory-gib 80 --method joint --output plan.json
"""

import argparse
from itertools import groupby

from omnibal_ext.chain import layer_names
from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.recompute import GIB
from omnibal_ext.layout.search import METHODS, RECOMPUTE_RULES, find_layouts, make_plan
from omnibal_ext.layout.workload import packs_of_index
from omnibal_ext.packing import PackedIndex
from omnibal_ext.plan import Plan
from omnibal_ext.profile_data import Profile
from omnibal_ext.schedule import SCHEDULE_NAMES


def main() -> None:
    """Parse, plan, print, write."""
    arguments = _parser().parse_args()
    for name in (
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "num_microbatches",
        "top_k",
        "pack_iterations",
    ):
        if getattr(arguments, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} must be at least 1, got {getattr(arguments, name)}")
    profile = Profile.load(arguments.profile)
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
    candidates = find_layouts(
        problem,
        arguments.method,
        recompute=arguments.recompute,
        radius=arguments.radius,
        top_k=arguments.top_k,
        seconds=arguments.seconds,
    )
    plan = make_plan(problem, candidates, arguments.method)
    plan.save(arguments.output)
    if arguments.json:
        print_json(plan.to_record() | {"output": arguments.output})
    else:
        print_plan(plan)


def print_plan(plan: Plan) -> None:
    """The plan as people read it: a row a stage, the next-best layouts, the distance from the ideal."""
    predicted = plan.predicted
    rows = []
    for number, stage in enumerate(plan.stages):
        rank, chunk = plan.rank_and_chunk(number)
        where = f"rank {rank}" + (f" chunk {chunk}" if plan.virtual_pipeline_model_parallel_size > 1 else "")
        rows.append(
            (
                where,
                _spans(plan, range(*stage.layers)),
                _spans(plan, stage.recompute) or "-",
                f"{predicted['stage_forward_seconds'][number] * 1e3:.2f}",
                f"{predicted['stage_backward_seconds'][number] * 1e3:.2f}",
                f"{predicted['stage_peak_bytes'][rank] / GIB:.2f}",
                predicted["stage_limit"][number],
            )
        )
    title = f"{plan.model or 'model'}: {plan.method}, {plan.schedule}, {plan.num_microbatches} microbatches"
    print_table(title, ("stage", "layers", "recomputed", "forward ms", "backward ms", "rank GiB", "limit"), rows)
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
    print(
        f"step {predicted['step_seconds'] * 1e3:.2f} ms, bubble {predicted['bubble_fraction']:.1%}, "
        f"{predicted['fraction_of_ideal']:.1%} of the ideal {predicted['ideal_seconds'] * 1e3:.2f} ms"
        + (", proven the fastest layout" if predicted["proven_best"] else "")
    )


def _spans(plan: Plan, layers: range | tuple[int, ...]) -> str:
    """Layer ids as people say them: "patch_embed, vit.0-3"."""
    names = layer_names(plan.chain)
    words = []
    for _, group in groupby(enumerate(sorted(layers)), key=lambda pair: (pair[1] - pair[0], plan.chain[pair[1]])):
        ids = [layer for _, layer in group]
        last = names[ids[-1]].rpartition(".")[2]
        words.append(names[ids[0]] if len(ids) == 1 else f"{names[ids[0]]}-{last}")
    return ", ".join(words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", required=True, help="profile.json of tools/profile_layers.py")
    parser.add_argument("--pipeline-model-parallel-size", type=int, required=True, help="pipeline ranks")
    parser.add_argument("--virtual-pipeline-model-parallel-size", type=int, default=1, help="chunks a rank (1: none)")
    parser.add_argument(
        "--num-microbatches", type=int, required=True, help="microbatches a data-parallel rank and step"
    )
    parser.add_argument("--memory-gib", type=float, default=float("inf"), help="of one rank; no limit unless given")
    parser.add_argument("--method", choices=METHODS, default=METHODS[-1], help="how to cut")
    parser.add_argument(
        "--recompute", choices=tuple(RECOMPUTE_RULES), default="fewest", help="the fewest layers that fit, or every one"
    )
    parser.add_argument("--schedule", choices=SCHEDULE_NAMES, default="1f1b", help="order of forwards and backwards")
    parser.add_argument("--packs", help="packed index: judge layouts on the packs that training will run")
    parser.add_argument("--pack-iterations", type=int, default=4, help="how many iterations of them")
    parser.add_argument("--seconds", type=float, default=4.0, help="joint: longest time to search")
    parser.add_argument("--radius", type=int, default=1, help="bmp: how many layers each cut may move from the anchor")
    parser.add_argument("--top-k", type=int, default=10, help="how many layouts are kept")
    parser.add_argument("--output", required=True, help="plan.json to write")
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")
    return parser


if __name__ == "__main__":
    run_tool(main)
