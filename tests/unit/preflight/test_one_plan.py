"""Ranks tell each other what they were given, and go on only with one plan."""

from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from megatron.vlm.preflight import one_plan
from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan
from tests.unit.preflight.test_replicated_tower import CHAIN, beside

WHOLE = replace(beside((0,), (0,), (0,)), lists=("E0.0 F0.0 B0.0 V0.0", "F0.1 B0.1"), predicted={"step_seconds": 1.0})
OTHERS = {
    "the same, predicted otherwise": replace(WHOLE, predicted={"step_seconds": 2.0}, method="joint"),
    "a word": replace(WHOLE, lists=("E0.0 F0.0 V0.0 B0.0", "F0.1 B0.1")),
    "an owner": replace(WHOLE, tower=replace(beside((0,)).tower, owners=(0, 1, *(0,) * 4), parts=((0,),) * 3)),
    "no tower": replace(WHOLE, tower=None),
    "another cut": replace(WHOLE, stages=Plan.from_cuts(CHAIN, (3,)).stages),
}


def told(plans: list[Plan]) -> list[str]:
    store = HashStore()

    def ask(rank: int) -> str:
        args = Namespace(rank=rank, world_size=len(plans), plan=f"plan-{rank}.json")
        try:
            one_plan._compare(store, one_plan.hash_of(plans[rank]), args)
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(plans)) as ranks:
        return list(ranks.map(ask, range(len(plans))))


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("rank", [0, 2])
def test_unlike_plans_are_refused_on_the_first_rank_and_those_that_differ(what: str, rank: int) -> None:
    plans = [WHOLE] * 3
    plans[rank] = OTHERS[what]
    for number, line in enumerate(told(plans)):
        refused = what != "the same, predicted otherwise" and (number in (0, rank) or rank == 0)
        other = 0 if number else rank or 1
        assert line.startswith(f"plan plan-{number}.json: rank {number} was given another than rank {other}") == refused
        assert bool(line) == refused
