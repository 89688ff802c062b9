"""Random layouts: each gives the loss and gradients of one process to `TOLERANCE`, or is refused in one line.

python -m tests.endurance.layouts [--count 60] [--seed 0]

A seed draws a model of `tests.distributed.harness`, what of it is trained or adapted, packs (a third of those with
data-parallel ranks run by several ranks together), ranks, cuts, schedule, recomputation, a cut or a replicated tower,
dropout and drop path. Where dropout masks depend on which ranks share a pack, the answer is not one process's but that
of a plain layout on the same ranks. Seeds with the same ranks share a start.
"""

import argparse
import json
import random
import sys
import tempfile
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.communicator import Communicator
from megatron.vlm.pipeline.executor import Executor
from megatron.vlm.pipeline.rank_packs import RankPacks
from megatron.vlm.preflight.run import check_replicated_tower
from omnibal_ext.adapters import check_adapters
from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan
from omnibal_ext.schedules.schedule import splits_backward
from tests.distributed import beside, beside_cases, beside_draws, cases, harness, wide
from tests.programs import ENGINE, PLAIN, result_of, run_ranks

PROGRAM = "tests.endurance.layouts"
REFUSED = -1.0
SECONDS = 120.0
"""That one layout may take."""
TOLERANCE = 1e-5
ITERATION = 2
"""The last of two: by then Megatron overlaps, and a tower that runs ahead has."""
FREEZE = (*cases.FREEZE, *[None] * 3)
"""None: adapters are trained."""
DROPOUT = ((0.0, 0.0, 0.0),) * 3 + ((0.3, 0.0, 0.5), (0.0, 0.0, 0.5), (0.3, 0.3, 0.0))
"""Hidden dropout, attention dropout, drop path."""
Answers = dict[tuple[cases.Question, tuple[float, ...]], harness.Result]


@dataclass(frozen=True)
class Ranks:
    """What layouts share that are run in one start."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    experts: int = 1
    server: str = PLAIN


RANKS = (
    Ranks(), Ranks(pipeline=2), Ranks(pipeline=3), Ranks(pipeline=4), Ranks(2), Ranks(2, 2), Ranks(data=2),
    Ranks(data=2, experts=2), Ranks(1, 2, 2), Ranks(1, 2, 2, 2), Ranks(2, 1, 2), Ranks(2, 1, 2, 4),
    Ranks(data=4, experts=2), Ranks(2, 2, server=ENGINE),
)  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """One layout, and what it is asked."""

    ranks: Ranks
    case: cases.Case
    tower: beside_cases.Beside | None
    """Of a replicated tower; the same case otherwise."""
    dropout: tuple[float, float, float]

    @property
    def needs_same_ranks(self) -> bool:
        """Whether the ranks that share a pack draw other masks than one process."""
        hidden, attention, _ = self.dropout
        shared = self.ranks.tensor > 1 and (attention or (hidden and self.case.sequence_parallel))
        return bool(shared or (self.case.wide and any(self.dropout)))


def drawn(seed: int) -> Draw:
    """The layout of a seed."""
    draw = random.Random(seed)
    ranks, model, freeze = draw.choice(RANKS), draw.choice([*harness.MODELS]), draw.choice(FREEZE)
    packs = draw.choice([packs for packs in cases.PACKS if beside_cases.PACK_COUNTS[packs] >= ranks.data])
    adapted = draw.choice(cases.ADAPTED) if freeze is None else ()
    question = cases.Question(model, freeze or (), packs, draw.choice(cases.REDUCTIONS), adapted)
    is_wide, is_replicated = ranks.data > 1 and draw.random() < 0.4, draw.random() < 0.4
    is_wide = is_wide and not harness.MODELS[model].further  # of which the loader refuses packs of several ranks
    schedules = cases.SCHEDULES if ranks.pipeline > 1 else (("1f1b", 1), ("zb_h1", 1))
    # Layers that stages can share: a replicated tower leaves six.
    limit = 6 if is_replicated or model == cases.LAYERLESS else 12
    schedule = draw.choice([one for one in schedules if one[1] * ranks.pipeline <= limit])
    shares = ranks.tensor > 1 and (model in cases.SHARING or draw.random() < 0.5)
    case = cases.Case(
        question, *schedule, draw.choice(cases.RECOMPUTE), shares, draw.random() < 0.5, draw.randrange(2**31), is_wide
    )
    kind = draw.choice((beside_cases.Beside, beside_draws.OneRank))
    microbatches = beside_cases.PACK_COUNTS[packs] // ranks.data
    end = draw.choice(beside_cases.ENDS) if model in cases.HEARING else beside_cases.ENDS[0]
    how = draw.choice(beside_cases.MODES), draw.choice(beside_cases.KEPT), draw.random() < 0.5, microbatches, end
    return Draw(ranks, case, kind(case, *how) if is_replicated else None, draw.choice(DROPOUT))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    fates, wrong = run(range(arguments.seed, arguments.seed + arguments.count))
    print("RESULT " + json.dumps({"fates": fates, "wrong": wrong}))


def run(seeds: Sequence[int]) -> tuple[Counter[str], list[str]]:
    """What became of the layouts of these seeds, `equal`, `refused` or `wrong`, and a line for each wrong one."""
    starts: dict[Ranks, list[int]] = defaultdict(list)
    for seed in seeds:
        starts[drawn(seed).ranks].append(seed)
    fates, wrong = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "answers.pt")
        run_ranks(PROGRAM, 1, ["answers", str(path), *map(str, seeds)], time_limit=SECONDS * len(seeds))
        for ranks, some in starts.items():
            for seed, found in differences(ranks, path, some).items():
                is_right = not isinstance(found, str) and found < TOLERANCE
                fates[("refused" if found == REFUSED else "equal") if is_right else "wrong"] += 1
                wrong += [] if is_right else [f"seed {seed}: {found}: {drawn(seed)}"]
    return fates, wrong


def differences(ranks: Ranks, path: Path, seeds: Sequence[int]) -> dict[int, float | str]:
    """How far layouts are from their answers; what a rank said, where one ends otherwise."""
    count = ranks.tensor * ranks.pipeline * ranks.data
    try:
        words = ["ranks", str(path), *map(str, seeds)]
        said = run_ranks(PROGRAM, count, words, time_limit=SECONDS * len(seeds), server=ranks.server)
        return {int(seed): found for seed, found in result_of(said).items()}
    except AssertionError as error:
        if len(seeds) == 1:
            return {seeds[0]: str(error)}
        return {seed: found for one in seeds for seed, found in differences(ranks, path, [one]).items()}


def on_ranks(what: str, path: str, *seeds: str) -> None:
    """The part of every rank: answers of one process, or how far layouts are from them, or `REFUSED`."""
    draws = {seed: drawn(int(seed)) for seed in seeds}
    ranks = Ranks() if what == "answers" else draws[seeds[0]].ranks
    limit = ("--distributed-timeout-minutes", "2")
    args = harness.start(harness.SMALL, ranks.tensor, ranks.pipeline, limit, experts=ranks.experts)
    if what == "answers":
        asked = [draw for draw in draws.values() if not (draw.needs_same_ranks or refused(args, draw))]
        torch.save({(draw.case.question, draw.dropout): one_process(args, draw) for draw in asked}, path)
        cases.compile_lists()
    else:
        answers, channels = torch.load(Path(path), weights_only=False), beside.open_image_channels(ranks.pipeline)
        harness.report({
            seed: REFUSED if refused(args, draw) else difference(args, draw, answers, channels)
            for seed, draw in draws.items()
        })  # fmt: skip
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def refused(args: Namespace, draw: Draw) -> bool:
    """Whether the checks of a run refuse the layout, in one line."""
    chain = chain_of(args, draw)
    try:
        check_adapters(chain.adapters, chain.architecture)
        plan = plan_of(draw, chain)
        plan.validate()
        check_replicated_tower(Namespace(**{**vars(args), "tensor_model_parallel_size": draw.ranks.tensor}), plan)
        if draw.case.wide and plan.tower:
            packs: Any = Namespace(index=Namespace(folder="packs", widths=wide.WIDTHS))
            RankPacks(plan.tower).add(packs, lambda: iter(()), 0)
    except UserError as error:
        return "\n" not in str(error)  # else whoever runs it dies of what was refused
    return False


def difference(args: Namespace, draw: Draw, answers: Answers, channels: Communicator) -> float:
    """Largest relative difference of the loss and any gradient."""
    if not draw.needs_same_ranks:
        loss, model = iterations(args, draw, channels)
        return harness.compare(model, answers[draw.case.question, draw.dropout], loss)
    plain = replace(draw.case, schedule="1f1b", chunks=1, recompute="none", overlap=False)
    expected_loss, model = iterations(args, replace(draw, case=plain, tower=None), channels)
    stages: list[dict[str, Tensor]] = [{} for _ in range(draw.ranks.pipeline)]
    group = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.all_gather_object(stages, harness.gradients(model), group=group)
    expected = {name: gradient for stage in stages for name, gradient in stage.items()}
    loss, model = iterations(args, draw, channels)
    worst = abs(loss - expected_loss) / max(abs(expected_loss), 1e-8)
    for name, mine in harness.gradients(model).items():
        whole = expected[name]
        scale = harness.largest(name, whole).clamp(min=1e-8)
        worst = max(worst, ((mine - whole).abs() / scale).max().item())
    return worst


def iterations(args: Namespace, draw: Draw, channels: Communicator) -> tuple[float, list[torch.nn.Module]]:
    """The last iteration's loss, and the model with its gradients."""
    case, tensor = draw.case, draw.ranks.tensor
    args.sequence_parallel, args.overlap_grad_reduce = case.sequence_parallel, case.overlap
    args.delay_wgrad_compute = platform.HAS_TRANSFORMER_ENGINE and splits_backward(case.schedule)
    chain, multiple, loss = chain_of(args, draw), tensor if case.sequence_parallel else 1, 0.0
    plan = plan_of(draw, chain)
    model = harness.build_model(chain, plan)

    def packs_of(iteration: int) -> list[Microbatch]:
        packs = packs_of_iteration(draw, iteration, 1 if case.wide else multiple)
        return wide.dealt(packs, case.seed, multiple, chain.architecture) if case.wide else packs

    microbatches = len(packs_of(0)) // (1 if case.wide else draw.ranks.data)
    lists = plan.build_schedule() if plan.tower else case.lists(plan, microbatches)
    executor = Executor(plan.schedule, lists=lists, tower=plan.tower)
    executor._communicator = channels
    for iteration in (ITERATION - 1, ITERATION):
        packs, reduction = packs_of(iteration), case.question.reduction
        if plan.tower:
            following = packs_of(iteration + 1)
            loss = beside.run_iteration(model, plan, packs, executor, reduction, following, iteration)
        else:
            loss = harness.run_iteration(model, plan, packs, executor, reduction, case.wide)
        if case.overlap:
            get_model_config(model[0]).finalize_model_grads_func = harness.finalize_what_is_under_way
    return loss, model


def one_process(args: Namespace, draw: Draw) -> harness.Result:
    """The answer of one process."""
    question = draw.case.question
    return harness.reference(chain_of(args, draw), packs_of_iteration(draw, ITERATION), question.reduction)


def packs_of_iteration(draw: Draw, iteration: int, multiple: int = 1) -> list[Microbatch]:
    """The packs, which draw other masks in every iteration."""
    packs = harness.sample_packs(draw.case.question.packs, multiple, draw.case.question.model)
    return [replace(pack, pack=number, iteration=iteration) for number, pack in enumerate(packs)]


def chain_of(args: Namespace, draw: Draw) -> Chain:
    """The chain that the layout cuts. Models at native resolution have no drop path."""
    question, model = draw.case.question, harness.MODELS[draw.case.question.model]
    args.hidden_dropout, args.attention_dropout, drop_path = draw.dropout
    if not model.vision.native:
        model = replace(model, vision=replace(model.vision, drop_path=drop_path))
    return harness.build_chain(args, model, question.freeze, question.adapted)


def plan_of(draw: Draw, chain: Chain) -> Plan:
    """Its plan."""
    if draw.tower is None:
        return draw.case.plan(chain.kinds, draw.ranks.pipeline)
    return draw.tower.plan(chain.kinds, draw.ranks.pipeline, draw.ranks.tensor)


if __name__ == "__main__":
    if sys.argv[1:2] in (["answers"], ["ranks"]):
        on_ranks(*sys.argv[1:])
    else:
        main()
