"""Ranks tell each other what they were given, and say what differs: by field, or by rank and word of a list."""

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
    "the same, predicted otherwise": (replace(WHOLE, predicted={"step_seconds": 2.0}, method="joint"), ""),
    "a word": (replace(WHOLE, lists=("E0.0 F0.0 V0.0 B0.0", "F0.1 B0.1")), "lists.0.2 is {}, not {}"),
    "a shorter list": (replace(WHOLE, lists=(WHOLE.lists[0], "F0.1")), "lists.1 has {} entries, not {}"),
    "an owner": (
        replace(WHOLE, tower=replace(beside((0,)).tower, owners=(0, 1, *(0,) * 4), parts=((0,),) * 3)),
        "tower.owners.1 is {}, not {}",
    ),
    "no tower": (replace(WHOLE, tower=None), "tower is {}, not {}"),
    "another cut": (replace(WHOLE, stages=Plan.from_cuts(CHAIN, (3,)).stages), "stages.0.layers.1 is {}, not {}"),
}  # fmt: skip


def told(plans: list[Plan]) -> list[str]:
    """What each rank is told; nothing where it may go on."""
    store = HashStore()

    def ask(rank: int) -> str:
        args = Namespace(rank=rank, world_size=len(plans), plan=f"plan-{rank}.json")
        try:
            one_plan._compare(store, one_plan.compared_fields(plans[rank]), args)
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(plans)) as ranks:
        return list(ranks.map(ask, range(len(plans))))


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("rank", [0, 2])
def test_unlike_plans_are_refused_on_the_first_rank_and_those_that_differ(what: str, rank: int) -> None:
    other, said = OTHERS[what]
    plans = [WHOLE] * 3
    plans[rank] = other
    found = told(plans)
    about = said.split(" is {}")[0].split(" has {}")[0]
    for number, line in enumerate(found):
        refused = bool(said) and (number in (0, rank) or rank == 0)
        assert bool(line) == refused
        assert not refused or f"plan plan-{number}.json: rank {number} was given another than rank " in line
        assert not refused or f": {about} " in line
    assert not said or f"than rank {rank or 1}: " in found[0]


def test_what_differs_is_named_with_both() -> None:
    mine, other = one_plan.compared_fields(WHOLE), one_plan.compared_fields(OTHERS["a word"][0])
    assert one_plan.first_difference("", mine, other) == "lists.0.2 is B0.0, not V0.0"
    assert one_plan.first_difference("", mine, mine) == ""
