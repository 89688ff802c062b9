"""E and V of a tower beside the pipeline: woven lists are whole and run; wrong ones are refused by rank and word."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal_ext.errors import UserError
from omnibal_ext.image_assignment import parts_of
from omnibal_ext.schedules.actions import Action, Beside, Schedule, check_packs, counts_of
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import check_schedule
from omnibal_ext.schedules.schedule import SCHEDULE_NAMES, build_schedule, placement_of
from omnibal_ext.schedules.weaving import first_and_last, in_time, with_encoding, woven
from tests.unit.drawn import drawn_lists, drawn_parts, placements

names = st.sampled_from(SCHEDULE_NAMES)


def language_of(schedule: Schedule) -> Schedule:
    return [[action for action in actions if action.kind not in "EV"] for actions in schedule]


@given(names, st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**31), st.booleans())
def test_woven_lists_are_whole_run_and_leave_the_language_models_order(
    name: str, ranks: int, microbatches: int, chunks: int, seed: int, ahead: bool
) -> None:
    placement, schedule = placement_of(name, ranks, chunks), build_schedule(name, ranks, microbatches, chunks)
    beside = Beside(drawn_parts(ranks, microbatches, seed), ahead)
    for insertions in (first_and_last(schedule, beside), in_time(schedule, microbatches, placement, beside)):
        found = woven(schedule, insertions)
        check_schedule(found, microbatches, placement, beside)
        check_packs(found, chunks)
        assert language_of(found) == schedule
        assert counts_of(found) == counts_of(schedule)
        for rank, actions in enumerate(found):
            mine = [m for m, parts in enumerate(beside.parts) if rank in parts]
            assert [a.microbatch for a in actions if a.kind == "E"] == mine
            assert [a.microbatch for a in actions if a.kind == "V"] == ([] if ahead else mine)


@given(names, st.integers(1, 4), st.integers(1, 9), st.integers(1, 2), st.integers(1, 5), st.integers(0, 2**31))
def test_evaluations_of_any_length_encode_a_little_ahead(
    name: str, ranks: int, microbatches: int, chunks: int, planned: int, seed: int
) -> None:
    """Parts of a plan for fewer or more microbatches begin anew; no rank has more than so many ranks' E in front."""
    placement, schedule = placement_of(name, ranks, chunks), build_schedule(name, ranks, microbatches, chunks)
    drawn = drawn_parts(ranks, planned, seed)
    beside = Beside(tuple(drawn[number % planned] for number in range(microbatches)))
    assert beside.parts == tuple(parts_of(drawn, number) for number in range(microbatches))
    found = with_encoding(schedule, beside)
    check_schedule(found, microbatches, placement, beside)
    assert language_of(found) == schedule
    for actions in found:
        behind = [
            later.microbatch - action.microbatch
            for at, action in enumerate(actions)
            if action.kind == "E" and (later := next((one for one in actions[at:] if one.kind == "F"), None))
        ]
        assert all(distance >= -ranks for distance in behind)


@given(placements, st.integers(1, 6), st.integers(0, 2**31))
def test_an_order_runs_only_what_has_all_it_waits_for(placement: Placement, microbatches: int, seed: int) -> None:
    """F of the first stage behind all E of its microbatch, V behind the first stage's B and its own E."""
    beside = Beside(drawn_parts(placement.ranks, microbatches, seed))
    schedule = drawn_lists(placement, microbatches, seed)
    found = woven(schedule, in_time(schedule, microbatches, placement, beside))
    order = check_schedule(found, microbatches, placement, beside).listed
    assert len(order) == sum(map(len, found))
    when = {place: second for second, place in enumerate(order)}
    first, chunk = placement.rank_and_chunk(0)
    for m, parts in enumerate(beside.parts):
        for part in parts:
            assert when[part, Action("E", m, part)] < when[first, Action("F", m, chunk)]
            assert when[first, Action("B", m, chunk)] < when[part, Action("V", m, part)]
            assert when[part, Action("E", m, part)] < when[part, Action("V", m, part)]


def lists(*words: str) -> Schedule:
    return [[Action.of_word(word) for word in one.split()] for one in words]


SOUND = ("E0.0 E1.0 F0.0 F1.0 B0.0 B1.0 V0.0 V1.0", "E1.1 F0.0 B0.0 F1.0 B1.0 V1.1")
BESIDE = Beside(((0,), (0, 1)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({0: ("E1.0 ", "")}, r"rank 0 never does E\(microbatch 1, part 0\)"),
        ({1: (" V1.1", "")}, r"rank 1 never does V\(microbatch 1, part 1\)"),
        ({1: ("E1.1", "E0.1 E1.1")}, r"rank 1 has E\(microbatch 0, part 1\) but no such work"),
        ({1: ("E1.1", "E1.0")}, r"rank 1 has E\(microbatch 1, part 0\) but no such work"),
        ({0: ("E1.0", "E1.0 E1.0")}, r"rank 0 has E\(microbatch 1, part 0\) twice"),
        ({0: ("E0.0 E1.0", "E1.0 E0.0")}, r"rank 0 runs E\(microbatch 0, part 0\) behind E\(microbatch 1, part 0\)"),
        ({0: ("V0.0 V1.0", "V1.0 V0.0")}, r"rank 0 runs V\(microbatch 0, part 0\) behind V\(microbatch 1, part 0\)"),
        ({0: ("E1.0 F0.0 F1.0", "F0.0 F1.0 E1.0")}, r"waits for ever at F\(microbatch 1, .* for E\(.* of rank 0"),
        ({1: ("E1.1 F0.0 B0.0 F1.0", "F0.0 B0.0 F1.0 E1.1")}, r"waits for ever"),
        ({0: ("B0.0 B1.0 V0.0", "V0.0 B0.0 B1.0")}, r"rank 0 waits for ever at V\(microbatch 0, part 0\)"),
    ],
)
def test_a_wrong_list_is_refused_by_rank_and_word(changed: dict[int, tuple[str, str]], message: str) -> None:
    check_schedule(lists(*SOUND), 2, beside=BESIDE)
    words = [text.replace(*changed.get(rank, ("", ""))) if rank in changed else text for rank, text in enumerate(SOUND)]
    with pytest.raises(UserError, match=message):
        check_schedule(lists(*words), 2, beside=BESIDE)


def test_without_a_tower_its_words_are_no_work_and_ahead_nothing_goes_back() -> None:
    with pytest.raises(UserError, match=r"rank 0 has E.* but no such work"):
        check_schedule(lists(*SOUND), 2)
    with pytest.raises(UserError, match=r"rank 0 has V.* but no such work"):
        check_schedule(lists(*SOUND), 2, beside=Beside(BESIDE.parts, ahead=True))
    late = lists("F0.0 F1.0 B0.0 E0.0 B1.0 E1.0", "F0.0 B0.0 F1.0 B1.0 E1.1")
    check_schedule(late, 2, beside=Beside(BESIDE.parts, ahead=True))


@given(names, st.integers(2, 5), st.integers(1, 9), st.integers(0, 2**31))
def test_first_and_last_is_the_pipeline_between(name: str, ranks: int, microbatches: int, seed: int) -> None:
    schedule = build_schedule(name, ranks, microbatches)
    beside = Beside(drawn_parts(ranks, microbatches, seed))
    for actions in woven(schedule, first_and_last(schedule, beside)):
        phases = ["EFV".index(a.kind) if a.kind in "EV" else 1 for a in actions]
        assert all(one <= other for one, other in pairwise(phases))


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**31))
def test_any_merging_that_keeps_what_waits_runs(ranks: int, microbatches: int, seed: int) -> None:
    """Drawn insertions: what check_schedule takes is what an order of all actions exists for, tried out one by one."""
    draw = random.Random(seed)
    schedule = build_schedule("1f1b", ranks, microbatches)
    beside = Beside(drawn_parts(ranks, microbatches, seed))
    insertions = first_and_last(schedule, beside)
    for rank, actions in enumerate(schedule):
        for row in insertions[:, rank]:
            row[row >= 0] = sorted(draw.randint(0, len(actions)) for _ in row[row >= 0])
    found = woven(schedule, insertions)
    if _runs(found, beside):
        check_schedule(found, microbatches, beside=beside)
    else:
        with pytest.raises(UserError, match="waits for ever"):
            check_schedule(found, microbatches, beside=beside)


def _runs(schedule: Schedule, beside: Beside) -> bool:
    last, done, at, moved = len(schedule) - 1, set[tuple[str, int, int]](), [0] * len(schedule), True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            while at[rank] < len(actions):
                kind, m = actions[at[rank]].kind, actions[at[rank]].microbatch
                needs = {
                    "E": [],
                    "V": [("E", m, rank), ("B", m, 0)],
                    "F": [("F", m, rank - 1)] if rank else [("E", m, part) for part in beside.parts[m]],
                    "B": [("F", m, rank), *([("B", m, rank + 1)] if rank < last else [])],
                }[kind]
                if not done.issuperset(needs):
                    break
                done.add((kind, m, rank))
                at[rank] += 1
                moved = True
    return at == [len(actions) for actions in schedule]
