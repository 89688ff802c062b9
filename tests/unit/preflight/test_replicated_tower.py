"""What does not go with a tower beside the pipeline is refused by name before there are ranks."""

import re
from argparse import Namespace
from dataclasses import replace

import pytest

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
