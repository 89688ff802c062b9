"""What does not go with a tower beside the pipeline is refused by name; ranks go on only with one plan."""

import re
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from megatron.vlm.preflight import one_plan
from megatron.vlm.preflight.run import check_replicated_tower
from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan
from omnibal_ext.plan_tower import Tower
from tests.distributed import harness

CHAIN = harness.SMALL.chain
LINKS = CHAIN.index("word_embed")
CUT = Plan.from_cuts(CHAIN, (LINKS + 1,), num_microbatches=3)


def beside(*parts: tuple[int, ...]) -> Plan:
    return replace(CUT, tower=Tower(LINKS, (0,) * LINKS, parts))


def flags(tensor: int = 1, hidden: float = 0.0, attention: float = 0.0) -> Namespace:
    return Namespace(tensor_model_parallel_size=tensor, hidden_dropout=hidden, attention_dropout=attention)


@pytest.mark.parametrize("which", ["hidden", "attention"])
def test_dropout_goes_with_parts_of_one_rank_alone(which: str) -> None:
    """Their masks are those of the whole pack; two ranks would draw others than a cut does."""
    dropout, alone, shared = {which: 0.25}, beside((1,), (0,), (1,)), beside((1,), (0, 1), (1,))
    for plan in (alone, shared):
        assert check_replicated_tower(flags(tensor=2), plan)
    assert check_replicated_tower(flags(**dropout), alone)
    assert check_replicated_tower(flags(tensor=2, **dropout), CUT) is None
    for tensor, plan, ranks, microbatch in ((1, shared, 2, 1), (2, alone, 2, 0), (2, shared, 4, 1)):
        named = f"--{which}-dropout 0.25: {ranks} ranks encode microbatch {microbatch} together"
        with pytest.raises(UserError, match=re.escape(named) + r".*--tower cut"):
            check_replicated_tower(flags(tensor, **dropout), plan)


WHOLE = replace(beside((0,), (0,), (0,)), lists=("E0.0 F0.0 B0.0 V0.0", "F0.1 B0.1"), predicted={"step_seconds": 1.0})
OTHERS = {
    "the same, predicted otherwise": replace(WHOLE, predicted={"step_seconds": 2.0}, method="joint"),
    "a word": replace(WHOLE, lists=("E0.0 F0.0 V0.0 B0.0", "F0.1 B0.1")),
    "an owner": replace(WHOLE, tower=replace(beside((0,)).tower, owners=(0, 1, *(0,) * 4), encoding_ranks=((0,),) * 3)),
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
