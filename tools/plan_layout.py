"""Choose where to cut the model and what to recompute; write plan.json.

    omnibal plan --profile profile.json --pipeline-model-parallel-size 4 --num-microbatches 8 \\
        --memory-gib 80 --method joint --output plan.json
    omnibal plan --analytic h100 --model qwen3-vl-8b --budgets 16384x8192 --tensor-sizes 2 \\
        --pipeline-model-parallel-size 4 --num-microbatches 32 --memory-gib 72 --output plan.json
    omnibal plan --sweep --analytic a100 --model internvl-chat-1.5 --gpus 32 --memory-gib 74.5 \\
        --global-batch-samples 128 --sizes sizes.npz --budgets 9x4096,14x5632 --output plan.json
"""

import argparse
import math

from omnibal_ext.architectures.presets import preset
from omnibal_ext.console import print_json, print_table, track
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.operations import installed_attention
from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.flags import flag_name, refuse
from omnibal_ext.layout.command import plan_parser, planned, print_plan
from omnibal_ext.layout.search import make_plan
from omnibal_ext.layout.sweep import Outcome, ProfileSource, settings, sweep
from omnibal_ext.modalities.modality import FURTHER, FURTHER_SIZES, budgets_in
from omnibal_ext.output import say
from omnibal_ext.packing.packers.budgets import budgets_for, further_budgets_for
from omnibal_ext.plan import Plan
from omnibal_ext.sizes import Sizes
from omnibal_ext.units import GIB


def main() -> None:
    """Plan as the flags say, write plan.json, and print the plan."""
    arguments = plan_parser(__doc__).parse_args()
    outcomes = _swept(arguments) if arguments.sweep else []
    plan = _best_of(outcomes, arguments) if arguments.sweep else planned(_only_profile(arguments), arguments)
    plan.save(arguments.output)
    if arguments.json:
        print_json(
            plan.to_record() | {"output": arguments.output, "sweep": [outcome.to_record() for outcome in outcomes]}
        )
    else:
        print_plan(plan)


def _only_profile(arguments: argparse.Namespace) -> Profile:
    """Return the profile of --profile, or the analytic one of the one budget and parallel sizes that flags name."""
    _refuse_missing(arguments, "pipeline_model_parallel_size num_microbatches", "is needed, except with --sweep")
    if not (arguments.profile or arguments.analytic):
        raise UserError("--profile is needed, or --analytic with --model, --budgets and --tensor-sizes")
    source, budgets, tensor_sizes, expert_sizes = _profile_source(arguments)
    if len(budgets) > 1 or len(tensor_sizes) > 1 or len(expert_sizes) > 1:
        raise UserError("--budgets, --tensor-sizes and --expert-sizes take one each, except with --sweep")
    tensor, experts = tensor_sizes[0], expert_sizes[0]
    return source(*budgets[0], tensor, math.lcm(tensor, experts) // tensor, experts)


def _swept(arguments: argparse.Namespace) -> list[Outcome]:
    """Plan all settings, print them and why some have no plan; return them, most samples a second first."""
    _refuse_missing(arguments, "sizes gpus global_batch_samples", "is needed by --sweep")
    source, budgets, tensor_sizes, expert_sizes = _profile_source(arguments)
    orders = arguments.chunks, arguments.schedules
    points = list(settings(arguments.gpus, tensor_sizes, arguments.pipeline_sizes, *orders, budgets, expert_sizes))
    outcomes = sweep(
        track(points, "planning settings", len(points)),
        _sizes(arguments),
        arguments.global_batch_samples,
        arguments.memory_gib * GIB,
        source,
        arguments.method,
        seconds=arguments.seconds,
        further=budgets_in(vars(arguments)),
    )
    if not arguments.json:
        _print_outcomes(outcomes)
    return outcomes


def _best_of(outcomes: list[Outcome], arguments: argparse.Namespace) -> Plan:
    if not outcomes or outcomes[0].problem is None:
        reason = outcomes[0].reason if outcomes else f"no parallel sizes make up {arguments.gpus} GPUs"
        raise UserError(f"no setting of the sweep can be planned; the first: {reason}")
    return make_plan(outcomes[0].problem, list(outcomes[0].candidates[: arguments.top_k]), arguments.method)


def _refuse_missing(arguments: argparse.Namespace, names: str, why: str) -> None:
    refuse(f"{flag_name(name)} {why}" for name in names.split() if getattr(arguments, name) is None)


def _profile_source(
    arguments: argparse.Namespace,
) -> tuple[ProfileSource, list[tuple[int, int]], list[int], list[int]]:
    """Return a function that makes profiles, with the budgets, tensor- and expert-parallel sizes to call it for:
    analytic profiles for all that flags name, or the one of --profile."""
    if arguments.analytic:
        architecture = preset(arguments.model)
        asked = budgets_in(vars(arguments))
        architecture.check_budgets(asked)
        sizes = _sizes(arguments)
        budgets = arguments.budgets or budgets_for(sizes)

        def source(vit: int, llm: int, t: int, d: int, e: int) -> Profile:
            device, ranks = arguments.analytic, 0
            if arguments.tower != "cut":
                ranks = t * arguments.pipeline_model_parallel_size
            return analytic_profile(
                architecture,
                device,
                {**further_budgets_for(sizes, llm), **asked, "tiles": vit, "tokens": llm},
                t,
                d,
                expert_model_parallel_size=e,
                replica_ranks=ranks,
                attention=installed_attention(),
            )

        return source, budgets, arguments.tensor_sizes, arguments.expert_sizes
    if not arguments.profile:
        raise UserError("--sweep needs --profile, or --analytic with --model")
    profile = Profile.load(arguments.profile)
    for one in FURTHER:
        setattr(arguments, one.budget, profile.budgets.get(one.size))
    parallel = [profile.tensor_model_parallel_size], [profile.expert_model_parallel_size]
    return (lambda *_: profile), [(profile.budgets["tiles"], profile.budgets["tokens"])], *parallel


def _sizes(arguments: argparse.Namespace) -> Sizes:
    """Return the sizes of all samples in the files of --sizes, or none without it; mel frames and the like only if the
    model reads them or they have a budget."""
    reads = {one.size for one in preset(arguments.model).modalities} if arguments.model else set()
    further = [size for size in FURTHER_SIZES if size in reads or size in budgets_in(vars(arguments))]
    return Sizes.load(arguments.sizes or [], further).without_unused()


def _print_outcomes(outcomes: list[Outcome]) -> None:
    rows = []
    for outcome in outcomes:
        if outcome.problem:
            speed = f"{outcome.samples_per_second:.2f} ± {outcome.noise:.1%}"
            ideal = f"{outcome.fraction_of_ideal:.1%}"
            rows.append((str(outcome.setting), outcome.problem.microbatches, speed, ideal))
    print_table("sweep", ("setting", "microbatches", "samples/s", "of the ideal"), rows)
    for outcome in outcomes:
        if not outcome.problem:
            say(f"no plan for {outcome.setting}: {outcome.reason}")


if __name__ == "__main__":
    run_tool(main)
