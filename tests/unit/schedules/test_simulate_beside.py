"""Lists with a tower beside the pipeline are played as a reference plays them, event by event."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal_ext.schedules.actions import Action, Beside, Schedule
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import compile_schedule
from omnibal_ext.schedules.schedule import build_schedule, placement_of
from omnibal_ext.schedules.simulate import Encoding, Simulation, StageCosts, simulate
from omnibal_ext.schedules.weaving import first_and_last, in_time, woven
from tests.unit.drawn import drawn_lists, drawn_parts

cases = st.tuples(
    st.sampled_from(["1f1b", "gpipe", "zb_h1", "zb_v"]), st.integers(1, 4), st.integers(1, 6), st.integers(1, 2)
)


def drawn(
    case: tuple[str, int, int, int], seed: int, ahead: bool
) -> tuple[Schedule, Placement, Beside, StageCosts, Encoding]:
    name, ranks, microbatches, chunks = case
    placement, random = placement_of(name, ranks, chunks), np.random.default_rng(seed)
    beside = Beside(drawn_parts(ranks, microbatches, seed), ahead)
    any_order, language = seed % 3 == 0, build_schedule(name, ranks, microbatches, chunks)
    if any_order:
        language = drawn_lists(placement, microbatches, seed)
    places = in_time(language, microbatches, placement, beside, early=int(random.integers(0, 9)), together=1 + seed % 3)
    lists = woven(language, places if seed % 4 else first_and_last(language, beside))
    shape = (placement.stages, microbatches)
    forward, backward, transfer, kept, late, transient = random.uniform(0.1, 2.0, (6, *shape))
    costs = StageCosts(
        forward, backward, backward * 0.4, transfer, kept, late * (name[:2] == "zb" or any_order), transient,
        random.uniform(0, 3, shape[0]), random.uniform(0, 1, shape[0]),
    )  # fmt: skip
    each = (ranks, microbatches)
    encoding = Encoding(
        random.uniform(0.1, 2.0, (2, *each)), random.uniform(0, 1, microbatches), *random.uniform(0, 2, (2, *each)),
        random.uniform(0, 2, microbatches), random.uniform(0, 3, ranks), random.uniform(0, 1, ranks),
    )  # fmt: skip
    return lists, placement, beside, costs, encoding


def reference_times(
    lists: Schedule, placement: Placement, beside: Beside, costs: StageCosts, encoding: Encoding
) -> dict[tuple[int, Action], tuple[float, float]]:
    """Start and end of every (rank, action): again and again, whatever has all it waits for."""
    split = any(action.kind == "W" for actions in lists for action in actions)
    times: dict[tuple[int, Action], tuple[float, float]] = {}
    asked = [0.0] * len(lists)
    """What hosts have taken so far."""
    first, first_chunk = placement.ranks_of[0], placement.stages_of[placement.ranks_of[0]].index(0)
    at = [0] * len(lists)

    def arrival(rank: int, action: Action) -> list[tuple[tuple[int, Action], float]]:
        m = action.microbatch
        hop = encoding.hops[m] * (rank != first)
        if action.kind == "E":
            return []
        if action.kind == "V":
            return [((rank, Action("E", m, rank)), 0.0), ((first, Action("B", m, first_chunk)), hop)]
        stage = placement.stages_of[rank][action.chunk]
        if action.kind == "W":
            return [((rank, Action("B", m, action.chunk)), 0.0)]
        if action.kind == "F" and stage == 0:
            if beside.ahead:
                return []
            return [((p, Action("E", m, p)), encoding.hops[m] * (p != first)) for p in beside.encoding_ranks[m]]
        other = stage - 1 if action.kind == "F" else stage + 1
        needs = [((rank, Action("F", m, action.chunk)), 0.0)] if action.kind == "B" else []
        if other < placement.stages:
            where = placement.ranks_of[other]
            layer = costs.transfer[min(stage, other), m] * (where != rank)
            needs.append(((where, Action(action.kind, m, placement.stages_of[where].index(other))), layer))
        return needs

    while any(place < len(actions) for place, actions in zip(at, lists, strict=True)):
        for rank, actions in enumerate(lists):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                needs = arrival(rank, action)
                if any(need not in times for need, _ in needs):
                    break
                before = times[rank, actions[at[rank] - 1]][1] if at[rank] else 0.0
                start = max([before, *(times[need][1] + more for need, more in needs)])
                end = start + seconds(rank, action, split, placement, costs, encoding)
                if costs.host is not None:
                    asked[rank] += costs.host["FBW".index(action.kind), placement.stages_of[rank][action.chunk]]
                times[rank, action] = (start, max(end, asked[rank]))
                at[rank] += 1
    return times


def seconds(
    rank: int, action: Action, split: bool, placement: Placement, costs: StageCosts, encoding: Encoding
) -> float:
    m = action.microbatch
    if action.kind in "EV":
        return float(encoding.seconds["EV".index(action.kind), rank, m])
    stage = placement.stages_of[rank][action.chunk]
    if action.kind == "B":
        return float(costs.backward[stage, m] - costs.weight[stage, m] * split)
    return float((costs.forward if action.kind == "F" else costs.weight)[stage, m])


@given(cases, st.integers(0, 2**31), st.booleans())
def test_every_action_starts_when_its_rank_is_free_and_all_it_waits_for_has_arrived(
    case: tuple[str, int, int, int], seed: int, ahead: bool
) -> None:
    """Of every rank the most bytes of all moments, each summed up anew from what has started and what has not."""
    lists, placement, beside, costs, encoding = drawn(case, seed, ahead)
    program = compile_schedule(lists, case[2], placement)
    played = simulate(program, costs, encoding)
    expected = reference_times(lists, placement, beside, costs, encoding)
    last = np.zeros(case[1])
    for rank, actions in enumerate(lists):
        found = played.timeline(rank)
        assert [action for action, _, _ in found] == actions
        for action, start, end in found:
            assert (start, end) == pytest.approx(expected[rank, action])
        own = [s for s, r in enumerate(placement.ranks_of) if r == rank]
        last[rank] = found[-1][2] + costs.step[own].sum() + encoding.step[rank]
        assert played.peak_bytes[rank] == pytest.approx(most_bytes(played, rank, placement, beside, costs, encoding))
        assert played.busy_seconds[rank] == pytest.approx(sum(end - start for _, start, end in found))
    assert played.step_seconds == pytest.approx(last.max())


def most_bytes(
    played: Simulation, rank: int, placement: Placement, beside: Beside, costs: StageCosts, encoding: Encoding
) -> float:
    order = np.argsort(played.start, kind="stable")
    actions = [played.program.listed[i] for i in order]
    own = [s for s, r in enumerate(placement.ranks_of) if r == rank]
    fixed = costs.fixed_bytes[own].sum() + encoding.fixed_bytes[rank]
    first, chunk = placement.ranks_of[0], placement.stages_of[placement.ranks_of[0]].index(0)
    split = played.program.split_backward

    def held(done: set[tuple[int, Action]]) -> float:
        total = 0.0
        for place, stage in enumerate(own):
            for m in range(costs.forward.shape[1]):
                forward, backward, weight = ((rank, Action(kind, m, place)) in done for kind in "FBW")
                total += costs.kept[stage, m] * (forward and not backward)
                total += costs.late[stage, m] * (split and backward and not weight)
        for m, parts in enumerate(beside.encoding_ranks):
            entered, came_back = ((first, Action(kind, m, chunk)) in done for kind in "FB")
            encoded = sum((part, Action("E", m, part)) in done for part in parts)
            if rank == first:
                waiting = encoded * (not entered) if not beside.ahead else len(parts) * (not entered) + encoded
                total += encoding.waiting[m] * waiting
            if rank in parts and not beside.ahead:
                mine, back = ((rank, Action(kind, m, rank)) in done for kind in "EV")
                total += (encoding.kept[rank, m] * mine + encoding.waiting[m] * came_back) * (not back)
            if rank in parts and beside.ahead:
                total += encoding.kept[rank, m] * ((rank, Action("E", m, rank)) in done)
        return total

    most, done = held(set()) * 0.0, set[tuple[int, Action]]()
    for who, action in actions:
        if who == rank and action.kind == "B":
            most = max(most, held(done) + costs.transient[placement.stages_of[rank][action.chunk], action.microbatch])
        if who == rank and action.kind == "V":
            most = max(most, held(done) + encoding.working[rank, action.microbatch])
        done.add((who, action))
        most = max(most, held(done))
    return float(fixed + most)
