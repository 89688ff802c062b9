"""What ranks that run a pack together exchange: counted head by head, and what it takes, in closed form."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.profile import PackSizes
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.tables import kind_tables
from omnibal_ext.modalities.work import HeadShares
from tests.unit.layout.instances import make_profile


@pytest.mark.parametrize(
    ("heads", "groups", "places"), [(8, 4, 3), (8, 2, 4), (28, 4, 8), (4, 4, 8), (6, 1, 4), (32, 8, 8), (3, 3, 2)]
)
def test_every_head_is_computed_once_with_its_own_group(heads: int, groups: int, places: int) -> None:
    shares = HeadShares(heads, groups, places)
    computed = [head for first, end in shares.heads for head in range(first, end)]
    assert computed == list(range(heads))
    sizes = [end - first for first, end in shares.heads]
    assert max(sizes) - min(sizes) <= 1
    for place, ((first, end), (low, high)) in enumerate(zip(shares.heads, shares.groups, strict=True)):
        read = [head // (heads // groups) for head in range(first, end)]
        assert sorted(set(read)) == list(range(low, high))
        assert shares.widths(place) == (end - first, high - low)
        in_turn = shares.by_head(place)
        each = heads // groups
        kernel = [i // each for i in range(end - first)]  # how a kernel deals heads over groups
        assert [low + group for group in (kernel if in_turn is None else in_turn)] == read


def numbers_sent(shares: HeadShares, rows: Sequence[int], width: int, place: int) -> int:
    """By a rank in the forward pass of a layer with heads of `width` numbers, of so many cut tokens on each rank."""
    sent = 0
    for other in set(range(shares.ranks)) - {place}:
        own, theirs = shares.heads[place], shares.heads[other]
        asked = {head // shares.each for head in range(*theirs)}
        sent += rows[place] * (theirs[1] - theirs[0] + 2 * len(asked)) * width  # query, key and value there
        sent += rows[other] * (own[1] - own[0]) * width  # and what comes of it back
    return sent


def test_a_token_takes_its_heads_there_and_back_over_the_links_of_a_node() -> None:
    profile = analytic_profile(
        preset("internvl3.5-8b"), "h100", {"tiles": 16, "tokens": 8192}, tensor_model_parallel_size=2
    )
    numbers = (32 + 2 * 8 + 32) * 128  # query, key and value there; what attention gives back
    assert profile.layers["llm"].exchange_seconds == pytest.approx(numbers * 2 / 2 / (450e9 * 0.8))
    assert profile.layers["vit"].exchange_seconds == profile.layers["head"].exchange_seconds == 0.0


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_seconds_are_those_of_the_numbers_that_ranks_send_keys_and_values_to_whoever_reads_them(
    width: int, tensor: int
) -> None:
    """Eight groups of keys and values: of more ranks than there are of these on one, several read the same."""
    profile = analytic_profile(
        preset("internvl3.5-8b"), "h100", {"tiles": 16, "tokens": 8192}, tensor_model_parallel_size=tensor
    )
    each = 8  # tokens of a sample on a rank
    shares = HeadShares(32 // tensor, 8 // tensor, width)
    if shares.count < width:
        return
    sent = max(numbers_sent(shares, [each] * width, 128, place) for place in range(width))
    tokens = each * (width - 1) // width  # as `share_loads` has them
    packs = PackSizes(*(np.array([[[value]]]) for value in (0, 8, 64, tokens, width)))
    assert profile.exchange_seconds("llm", packs).item() == pytest.approx(sent * 2 / (450e9 * 0.8))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_language_layers_take_longer_by_what_they_exchange(schedule: str) -> None:
    """Forward, backward and run again; weights' gradients wait for nothing."""
    profile = make_profile(2, 3)
    cost = replace(profile.layers["llm"], exchange_seconds=0.25)
    profile = replace(profile, layers=profile.layers | {"llm": cost})
    plain = PackSizes(*(np.array([[[4, 8]]], dtype=np.int64) for _ in range(3)))
    wide = replace(plain, exchanged=np.array([[[12, 0]]], dtype=np.int64))
    one, other = (kind_tables(profile, packs, 2, schedule == "zb_h1") for packs in (plain, wide))
    llm = [*profile.chain].index("llm")
    column = LayoutProblem(profile, 1, 2, schedule_name=schedule, packs=wide).kind_ids[llm]
    for name in ("forward", "backward"):
        more = getattr(other, name) - getattr(one, name)
        assert more[column, 0].tolist() == pytest.approx([3.0, 0.0])
        assert not np.delete(more, column, axis=0).any()
    assert np.array_equal(one.weight, other.weight)
    layers = profile.chain.count("llm")
    edges = (0, len(profile.chain))
    steps = [
        LayoutProblem(profile, 1, 2, schedule_name=schedule, packs=packs).step_seconds(Layout(edges, ((),)))
        for packs in (plain, wide)
    ]
    assert steps[1] - steps[0] == pytest.approx(layers * 6.0)
