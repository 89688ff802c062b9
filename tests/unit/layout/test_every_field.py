"""Every field of a profile, measured or not, is in the planner's figures as its description says.

The reference adds up layer by layer, in plain Python; the profile has a figure of its own in every field.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

from omnibal_ext.chain import KINDS
from omnibal_ext.costs.profile import LayerCost, PackSizes, Profile
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.modalities.modality import VISION
from omnibal_ext.packing.costs import PackCosts
from tests.chains import layer_chain

MICROBATCHES = 3
CARRIED = (0, 0, 0, 0, 0, 1, 2, 2, 0, 0)
CHAIN = layer_chain(3, 3)
LAYOUT = Layout((0, 3, 7, len(CHAIN)), ((1,), (), (7,)), ((2,), (), (8,)))
"""Stages patch_embed vit vit | vit projector word_embed llm | llm llm head."""
WORDS = {"model", "model_hash", "device", "dtype", "measured_with", "corrected_by", "notes", "schema_version"}
"""Fields of a profile that are no costs."""
ELSEWHERE = {
    "parameters": "of the cut by parameters alone: test_partition.py",
    **dict.fromkeys(("expert_model_parallel_size", "tensor_model_parallel_size"),
                    "chooses what is measured"),
    "trained": "modes: test_predictions.py",
    **dict.fromkeys(("features_joined", "layers_apart"), "test_layers_apart.py"),
    **dict.fromkeys(("whole_layers", "image_tiles", "replica_seconds_per_byte"),
                    "of a tower beside the pipeline: test_beside.py"),
    "supervised_share": "what the head's figures are of: test_profile.py",
}  # fmt: skip


KEYS = ("exchange_key_seconds", "exchange_groups")


def measured_cost(random: np.random.Generator) -> LayerCost:
    """A figure of its own in every field, as far as they go together."""
    names = [field.name for field in fields(LayerCost) if field.name not in KEYS]
    values: dict[str, Any] = {name: float(random.uniform(1.0, 2.0)) for name in names}
    for fit in ("forward_fit", "backward_fit"):
        values[fit] = tuple(random.uniform(0.1, 0.4, 3).tolist())
    values |= {"kept_bytes": 9.0 + values["kept_bytes"], "late_bytes": 5.0 + values["late_bytes"]}
    values |= {"backward_seconds": 3.0 + values["backward_seconds"]}
    values |= {"split_backward_seconds": 4.0 + values["split_backward_seconds"]}
    return LayerCost(**values, **{name: float(random.uniform(1.0, 2.0)) for name in KEYS})


def measured_profile(seed: int) -> Profile:
    random = np.random.default_rng(seed)
    costs = {kind: measured_cost(random) for kind in KINDS}
    for kind in ("word_embed", "head"):  # without fits, and with the figures that are left out as often as not
        costs[kind] = replace(costs[kind], forward_fit=None, backward_fit=None, split_backward_seconds=None,
                              split_forward_seconds=None, host_split_forward_seconds=None,
                              host_split_backward_seconds=None, weight_gradient_seconds=None)  # fmt: skip
    seconds, latency, overhead, action, iteration, host = random.uniform(0.2, 0.9, 6).tolist()
    return Profile(
        "tiny", "aa", CHAIN, costs, {"tiles": 4, "tokens": 16}, feature_layers=(1,), carried_after=CARRIED,
        transfer_seconds_per_byte=seconds,
        transfer_latency_seconds=latency, overhead_bytes=overhead, action_seconds=action, iteration_seconds=iteration,
        host_action_seconds=host,
    )  # fmt: skip


def some_packs(seed: int) -> PackSizes:
    random = np.random.default_rng((seed, 1))
    tokens = random.integers(2, 17, (1, 1, MICROBATCHES))
    tiles = random.integers(1, 5, tokens.shape)
    tiles[..., 1] = 0
    return PackSizes(tiles, tokens, tokens**2 - 1, tokens // 2, random.choice([1, 2, 4], tokens.shape))


def reference(profile: Profile, packs: PackSizes, split: bool) -> dict[str, np.ndarray]:
    """What `LayoutProblem.stage_costs` gives for `LAYOUT`, one stage a rank; and the seconds of each part of packs."""
    each = ("forward", "backward", "weight", "transfer", "kept", "late")
    found = {name: np.zeros((3, MICROBATCHES)) for name in each}
    found |= {name: np.zeros(3) for name in ("fixed_bytes", "step")}
    found["host"] = np.full((3, 3), profile.host_action_seconds)
    assert packs.exchanged is not None
    sizes = list(zip(packs.tiles.ravel(), packs.tokens.ravel(), packs.squares.ravel(), strict=True))
    assert packs.widths is not None
    sent = list(zip(packs.exchanged.ravel().tolist(), packs.widths.ravel().tolist(), strict=True))
    for s, (first, end) in enumerate(pairwise(LAYOUT.edges)):
        found["fixed_bytes"][s] = profile.overhead_bytes + sum(profile.layers[k].weight_bytes for k in CHAIN[first:end])
        found["step"][s] = profile.iteration_seconds + sum(profile.layers[k].step_seconds for k in CHAIN[first:end])
        for layer in range(first, end):
            again = layer in LAYOUT.recompute[s]
            cost = profile.layers[CHAIN[layer]]
            uncompiled = (cost.host_split_forward_seconds, cost.host_split_backward_seconds) if split else (None, None)
            compiled = (cost.host_forward_seconds, cost.host_backward_seconds)
            launch, back = (b if a is None else a for a, b in zip(uncompiled, compiled, strict=True))
            found["host"][0, s] += launch
            found["host"][1, s] += back + again * launch
        for m, pack in enumerate(sizes):
            found["forward"][s, m] += profile.action_seconds
            found["backward"][s, m] += profile.action_seconds * (2 if split else 1)
            found["weight"][s, m] += profile.action_seconds * split
            for layer in range(first, end):
                add_layer(found, profile, (s, m), layer, pack, sent[m], split)
            last = profile.layers[CHAIN[end - 1]]
            units = load(profile, CHAIN[end - 1], pack)
            features = len(profile.feature_layers) * (end == 3)  # that of ViT layer 1, until the first language layer
            carried = profile.carried_after[end - 1] if profile.carried_after else 0
            bytes_behind = last.output_bytes * units * (1 + features + carried)
            hop = profile.transfer_latency_seconds + profile.transfer_seconds_per_byte * bytes_behind
            found["transfer"][s, m] = hop * (s < 2)
            if first == 3:  # the feature is held beside what enters
                held = profile.layers["vit"].output_bytes * load(profile, "vit", pack)
                found["kept"][s, m] += held * len(profile.feature_layers)
            if s and profile.carried_after:
                enters = profile.layers[CHAIN[first - 1]].output_bytes * load(profile, CHAIN[first - 1], pack)
                found["kept"][s, m] += enters * profile.carried_after[first - 1]
    return found


def load(profile: Profile, kind: str, pack: tuple[int, int, int]) -> float:
    return pack[0] / profile.budget("tiles") if kind in VISION.kinds else pack[1] / profile.budget("tokens")


def seconds(profile: Profile, kind: str, name: str, pack: tuple[int, int, int]) -> float:
    cost, vision = profile.layers[kind], kind in VISION.kinds
    units = pack[0] if vision else pack[1]
    if units == 0:
        return cost.empty_seconds if name == "backward" else 0.0
    fit = getattr(cost, f"{name}_fit")
    if fit is None:
        return float(getattr(cost, f"{name}_seconds") * load(profile, kind, pack))
    return float(fit[0] + fit[1] * units + (0.0 if vision else fit[2] * pack[2]))


def add_layer(
    found: dict[str, np.ndarray], profile: Profile, at: tuple[int, int], layer: int, pack: tuple[int, int, int],
    sent: tuple[int, int], split: bool,
) -> None:  # fmt: skip
    kind = CHAIN[layer]
    cost, units, stage = profile.layers[kind], load(profile, kind, pack), at[0]
    forward, backward = (seconds(profile, kind, name, pack) for name in ("forward", "backward"))
    if split and cost.split_forward_seconds is not None:
        forward *= cost.split_forward_seconds / cost.forward_seconds
    both = cost.backward_seconds
    if split and cost.split_backward_seconds is not None:
        backward, both = backward * cost.split_backward_seconds / both, cost.split_backward_seconds
    of_weights = 0.5 if cost.weight_gradient_seconds is None else cost.weight_gradient_seconds / both
    tokens, width = sent
    others = max(0.0, width / cost.exchange_groups - 1)  # who get keys and values that one other has already
    exchange = tokens * (cost.exchange_seconds + others * cost.exchange_key_seconds)
    forward += exchange
    found["forward"][at] += forward
    found["weight"][at] += backward * of_weights
    found["backward"][at] += backward + exchange
    found["kept"][at] += cost.kept_bytes * units
    found["late"][at] += (cost.kept_bytes if cost.late_bytes is None else cost.late_bytes) * units
    once, cheap = cost.forward_seconds, cost.recompute_cheap_seconds
    if split and cheap is not None and cost.split_forward_seconds is not None:  # beside a layer that is not compiled
        once = cost.split_forward_seconds
        cheap -= (once - cost.forward_seconds) + (both - cost.backward_seconds)
    for ids, again, kept in (
        (LAYOUT.recompute[stage], cost.extra_seconds * once / cost.forward_seconds, cost.recompute_kept_bytes),
        (LAYOUT.recompute_cheap[stage], cheap and max(0, cheap), cost.recompute_cheap_kept_bytes),
    ):
        if layer in ids:
            found["backward"][at] += forward * again / once
            found["kept"][at] -= (cost.kept_bytes - kept) * units
            if cost.late_bytes is None:
                found["late"][at] -= (cost.kept_bytes - kept) * units


def problem_of(profile: Profile, packs: PackSizes, schedule: str) -> LayoutProblem:
    return LayoutProblem(profile, 3, MICROBATCHES, schedule_name=schedule, packs=packs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("left_out", [(), ("recompute_seconds", "late_bytes")])
def test_costs_of_stages_are_sums_over_their_layers(seed: int, schedule: str, left_out: tuple[str, ...]) -> None:
    profile, packs = measured_profile(seed), some_packs(seed)
    layers = {kind: replace(cost, **dict.fromkeys(left_out)) for kind, cost in profile.layers.items()}
    profile = replace(profile, layers=layers)
    found = problem_of(profile, packs, schedule).stage_costs(LAYOUT)
    for name, expected in reference(profile, packs, schedule == "zb_h1").items():
        if name == "transfer":
            assert found.transfer[:2] == pytest.approx(expected[:2])
        else:
            assert getattr(found, name) == pytest.approx(expected), name


def with_more(profile: Profile, kind: str, name: str) -> Profile:
    """The profile with another figure in one field, of the costs of a kind or, where that is "", of its own."""
    holder: Any = profile.layers[kind] if kind else profile
    value = getattr(holder, name)
    if name in ("feature_layers", "carried_after"):
        changed: Any = ()
    elif name == "budgets":
        changed = {size: budget + 3 for size, budget in value.items()}
    elif isinstance(value, tuple):
        changed = tuple(1.5 * figure for figure in value)
    else:
        changed = value + 3 if isinstance(value, int) else 1.5 * value
    other = replace(holder, **{name: changed})
    return replace(profile, layers={**profile.layers, kind: other}) if kind else other


def cost_fields() -> Iterator[tuple[str, str]]:
    yield from ((kind, field.name) for kind in ("vit", "llm") for field in fields(LayerCost)
                if (kind, field.name) != ("llm", "empty_seconds"))  # fmt: skip
    own = {field.name for field in fields(Profile)} - WORDS - set(ELSEWHERE) - {"chain", "layers"}
    yield from (("", name) for name in sorted(own))


@pytest.mark.parametrize(("kind", "name"), cost_fields())
def test_no_field_is_without_meaning(kind: str, name: str) -> None:
    """Changed alone, each of them changes what the reference says, and the planner with it."""
    profile, packs = measured_profile(8), some_packs(8)
    changed = with_more(profile, kind, name)
    moved = False
    for schedule in ("1f1b", "zb_h1"):
        before, after = (problem_of(p, packs, schedule).stage_costs(LAYOUT) for p in (profile, changed))
        expected = reference(changed, packs, schedule == "zb_h1")
        for cost in fields(after):
            if cost.name == "transient":
                continue
            here, rows = getattr(after, cost.name), slice(0, 2 if cost.name == "transfer" else 3)
            if cost.name in expected:
                assert here[rows] == pytest.approx(expected[cost.name][rows]), cost.name
            moved = moved or not np.allclose(here, getattr(before, cost.name))
    assert moved


@pytest.mark.parametrize("seed", range(3))
def test_packs_cost_what_their_layers_cost(seed: int) -> None:
    """Seconds forward and backward of each part; the constants of fits once a pack, unless there is nothing to do."""
    profile, packs = measured_profile(seed), some_packs(seed)
    loads = np.stack([packs.tiles.ravel(), packs.tokens.ravel(), packs.squares.ravel()], axis=1)
    found = PackCosts.of_profile(profile).seconds(loads, ("tiles", "tokens", "attention"))
    for row, pack in zip(found, loads.tolist(), strict=True):
        for part, vision in enumerate((True, False)):
            kinds = [kind for kind in CHAIN if (kind in VISION.kinds) == vision]
            units = pack[0] if vision else pack[1]
            expected = sum(seconds(profile, kind, name, pack) for kind in kinds for name in ("forward", "backward"))
            assert row[part] == pytest.approx(expected if units else 0.0)


def test_an_iteration_is_its_last_end_and_the_step() -> None:
    """One rank, everything one after the other: what it takes is the sum of all of it."""
    profile, packs = measured_profile(3), some_packs(3)
    whole = Layout((0, len(CHAIN)), ((1, 7),), ((2, 6),))
    problem = LayoutProblem(profile, 1, MICROBATCHES, packs=packs)
    costs = problem.stage_costs(whole)
    expected = (costs.forward + costs.backward).sum() + costs.step.sum()
    assert problem.step_seconds(whole) == pytest.approx(expected)
    assert problem.step_seconds(whole) == pytest.approx(problem.simulate(whole).step_seconds)


def test_ideal_seconds_are_the_needed_work_shared_evenly() -> None:
    """Of a mean iteration: these two are not alike."""
    profile, both = measured_profile(5), (some_packs(5), some_packs(6))
    sizes = [np.concatenate([getattr(one, name) for one in both]) for name in ("tiles", "tokens", "squares")]
    packs, ways = PackSizes(*sizes), [*product(CHAIN, ("forward", "backward"))]
    each = zip(*(size.ravel() for size in sizes), strict=True)
    needed = sum(seconds(profile, kind, name, pack) / 2 for pack in each for kind, name in ways)
    for ranks in (1, 3):
        assert LayoutProblem(profile, ranks, MICROBATCHES, packs=packs).ideal_seconds() == pytest.approx(needed / ranks)


def test_fields_left_out_here_are_fields() -> None:
    names = {field.name for field in fields(Profile)}
    assert set(ELSEWHERE) <= names
    assert names >= WORDS
