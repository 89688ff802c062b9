"""Logits, loss and gradients of every family are those of transformers; a pack gives what its samples give alone."""

from functools import cache

import pytest

from tests.distributed.conftest import run_program
from tests.long import short
from tests.programs import ENGINE, PLAIN
from tests.unit.hf.models import AT_ONE_RANK, FAMILIES, OF_A_KIND, OF_AN_ENGINE

pytest.importorskip("transformers")
pytestmark = pytest.mark.starts
TOLERANCE = 2e-5  # seen: 2e-6
OF_DECAY = 2e-4
"""Of gradients of models with linear attention: that of what a state keeps is a small difference of large sums."""
WAYS = {
    "one rank": (
        1, PLAIN, tuple(one for one in FAMILIES if one in AT_ONE_RANK or one not in OF_A_KIND), tuple(FAMILIES),
    ),
    "two tensor-parallel ranks": (2, PLAIN, OF_A_KIND, tuple(FAMILIES)),
    "two tensor-parallel ranks, Transformer Engine": (2, ENGINE, OF_AN_ENGINE, OF_A_KIND),
}  # fmt: skip
"""Ranks, machine, the families that are always tried, and those of the long suite."""
CASES = short(
    [(way, family) for way, (*_, families) in WAYS.items() for family in families],
    [(way, family) for way, (_, _, families, _) in WAYS.items() for family in families],
)


@cache
def differences(way: str, often: bool) -> dict[str, dict[str, float]]:
    """Of the families that are always tried, or of the others: Megatron starts once for all of them."""
    ranks, server, kept, families = WAYS[way]
    chosen = kept if often else [family for family in families if family not in kept]
    return run_program("tests.unit.hf.parity", ranks, *chosen, server=server)


def found(case: tuple[str, str]) -> dict[str, float]:
    way, family = case
    return differences(way, family in WAYS[way][2])[family]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_family_equals_transformers(case: tuple[str, str]) -> None:
    """And its weights, read by Megatron at this tensor-parallel size, saved by it and exported: names, files and bits
    are the same (on one rank: test_convert.py). Freezing the ViT freezes what transformers has in its tower: its last
    norm too, which lies in the projector's layer, and which freezing the projector leaves trained."""
    one = found(case)
    assert one["scale"] > 1, "logits so small that any model would pass"
    assert one["logits"] < TOLERANCE
    assert one["loss"] < TOLERANCE
    assert one["gradients"] < (OF_DECAY if case[1].startswith("qwen3.5") else TOLERANCE)
    assert not one["bits lost"]
    assert not one["frozen otherwise"]
