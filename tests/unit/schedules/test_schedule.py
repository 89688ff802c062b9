"""Schedules: every builder is complete and free of deadlock, woven with E and V of a tower beside the pipeline too; bad
lists are refused by name.
"""

import itertools
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal_ext.errors import UserError
from omnibal_ext.image_assignment import encoding_ranks_of
from omnibal_ext.schedules.actions import Action, Beside, Schedule, check_packs, counts_of, has_weight_gradients
from omnibal_ext.schedules.program import check_schedule, compile_schedule
from omnibal_ext.schedules.schedule import (
    INSTEAD,
    OFFERED,
    SCHEDULE_NAMES,
    build_schedule,
    gpipe,
    interleaved_one_f_one_b,
    offered,
    one_f_one_b,
    placement_of,
    zero_bubble,
)
from omnibal_ext.schedules.weaving import first_and_last, in_time, with_encoding, woven
from tests.unit.drawn import drawn_parts


def in_flight_limits(schedule: Schedule) -> list[list[int]]:
    """Per rank and chunk: the most microbatches whose activations are held at once."""
    signs = {"F": 1, "W" if has_weight_gradients(schedule) else "B": -1}
    limits = []
    for actions in schedule:
        of_chunks = [[a for a in actions if a.chunk == chunk] for chunk in sorted({a.chunk for a in actions})]
        limits.append([max(itertools.accumulate(signs.get(a.kind, 0) for a in mine)) for mine in of_chunks])
    return limits


@given(st.integers(1, 8), st.integers(1, 12))
def test_1f1b_holds_ranks_minus_stage_microbatches_and_h1_no_more_than_its_first(ranks: int, microbatches: int) -> None:
    wanted = [[min(ranks - s, microbatches)] for s in range(ranks)]
    assert in_flight_limits(one_f_one_b(ranks, microbatches)) == wanted
    assert max(in_flight_limits(zero_bubble(ranks, microbatches))) == wanted[0]
    assert in_flight_limits(gpipe(ranks, microbatches)) == [[microbatches]] * ranks


@given(st.integers(1, 6), st.integers(1, 14), st.booleans())
def test_zero_bubble_holds_a_microbatch_or_two_fewer_on_each_later_rank(ranks: int, count: int, h2: bool) -> None:
    """Between F and B; Qi et al. 2023, figures 2 and 3."""
    for rank, actions in enumerate(zero_bubble(ranks, count, extra_in_flight=h2)):
        held = list(itertools.accumulate((a.kind == "F") - (a.kind == "B") for a in actions))
        assert max(held) <= max(1, 2 * (ranks - rank) - 1 if h2 else ranks - rank)


def test_lists_written_out() -> None:
    """Narayanan et al. 2021, figure 4: the first rank of two, with two chunks."""
    words = ["".join(a.kind + str(a.microbatch) for a in actions) for actions in one_f_one_b(2, 3)]
    assert words == ["F0F1B0F2B1B2", "F0B0F1B1F2B2"]
    chunks = [action.word for action in interleaved_one_f_one_b(2, 4, 2)[0][:8]]
    assert chunks == ["F0.0", "F1.0", "F0.1", "F1.1", "F2.0", "B0.1", "F3.0", "B1.1"]
    assert in_flight_limits(zero_bubble(4, 20, extra_in_flight=True)) == [[7]] * 4, "H2 holds at most twice as much"


@given(st.integers(2, 4), st.integers(1, 4), st.randoms(use_true_random=False))
def test_shuffled_lists_are_refused_exactly_when_no_order_exists(ranks: int, microbatches: int, random) -> None:  # type: ignore[no-untyped-def]
    schedule = one_f_one_b(ranks, microbatches)
    for actions in schedule:
        i, j = random.randrange(len(actions)), random.randrange(len(actions))
        actions[i], actions[j] = actions[j], actions[i]
    try:
        check_schedule(schedule, microbatches)
        runs = True
    except UserError as error:
        runs = "deadlock" not in str(error)
    assert runs == has_order(schedule, Beside(((),) * microbatches))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("F0.0 F1.0 B0.0 B1.0", "F0.0 B0.0 F1.0"), r"rank 1 never does B\(microbatch 1, chunk 0\)"),
        (("F0.0 F1.0 B0.0 B1.0 F0.0", "F0.0 B0.0 F1.0 B1.0"), r"rank 0 has F\(microbatch 0, chunk 0\) twice"),
        (("F0.0 F1.0 F2.0 B0.0 B1.0 B2.0",), "no such work"), (("B0.0 F0.0 F1.0 B1.0",), "rank 0 waits for ever"),
        (("F0.0 B0.0 F1.0 B1.0", "F1.0 B1.0 F0.0 B0.0"),
         r"rank 0 waits for ever at B\(microbatch 0, chunk 0\) .* rank 1"),
    ],
)  # fmt: skip
def test_lost_doubled_and_foreign_actions_and_deadlocks_are_named(words: tuple[str, ...], message: str) -> None:
    for check in (check_schedule, compile_schedule):
        with pytest.raises(UserError, match=message):
            check(lists(*words), 2)


@pytest.mark.parametrize(("name", "numbers"), [("2f2b", (1, 1, 1)), ("1f1b", (0, 1, 1)), ("gpipe", (1, 0, 1))])
def test_unknown_names_and_counts_under_one_are_refused(name: str, numbers: tuple[int, int, int]) -> None:
    with pytest.raises(UserError):
        build_schedule(name, *numbers)


def test_what_no_plan_is_fastest_with_is_refused_by_name_and_run_by_name() -> None:
    assert set(map(offered, OFFERED)) | {"gpipe", "zb_h2", "v_half", "v_min"} == set(SCHEDULE_NAMES)
    for name, instead in INSTEAD.items():
        with pytest.raises(UserError, match=f"schedule {name} .* use {offered(instead)}$"):
            offered(name)
        assert build_schedule(name, 2, 3, 2)
    with pytest.raises(UserError, match="'2f2b' is not known"):
        offered("2f2b")


def test_built_lists_are_the_callers_own() -> None:
    build_schedule("1f1b", 2, 2)[0].clear()
    assert all(build_schedule("1f1b", 2, 2))
    assert len(list(itertools.chain(*build_schedule("zb_h1", 2, 2)))) == 12


def test_forwards_that_take_packs_in_another_order_than_they_come_are_refused() -> None:
    schedule = lists("F0.0 F1.0 B0.0 B1.0", "F1.0 F0.0 B0.0 B1.0")
    with pytest.raises(UserError, match=r"rank 1 runs F\(microbatch 1, chunk 0\) where the pack of microbatch 0 comes"):
        check_packs(schedule)


@given(st.integers(0, 999), st.integers(0, 99), st.integers(0, 9))
def test_an_action_is_read_as_it_is_written(microbatch: int, chunk: int, kind: int) -> None:
    action = Action("FBW"[kind % 3], microbatch, chunk)
    assert Action.of_word(action.word) == action


@pytest.mark.parametrize("word", ["", "F", "F1", "G1.0", "F-1.0", "F1.0.0", "F1,0", "F\u0663.0", "F" + "9" * 50 + ".0"])
def test_other_words_are_no_actions(word: str) -> None:
    with pytest.raises(UserError, match="is no action"):
        Action.of_word(word)


names = st.sampled_from(SCHEDULE_NAMES)


def language_of(schedule: Schedule) -> Schedule:
    return [[action for action in actions if action.kind not in "EV"] for actions in schedule]


@given(names, st.integers(1, 5), st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**31), st.booleans())
def test_woven_lists_are_whole_run_and_leave_the_language_models_order(
    name: str, ranks: int, microbatches: int, chunks: int, seed: int, ahead: bool
) -> None:
    placement, schedule = placement_of(name, ranks, chunks), build_schedule(name, ranks, microbatches, chunks)
    beside = Beside(drawn_parts(ranks, microbatches, seed), ahead)
    for places in (first_and_last(schedule, beside), in_time(schedule, microbatches, placement, beside)):
        found = woven(schedule, places)
        check_schedule(found, microbatches, placement, beside)
        check_packs(found, chunks)
        assert language_of(found) == schedule
        assert counts_of(found) == counts_of(schedule)
        for rank, actions in enumerate(found):
            mine = [m for m, parts in enumerate(beside.encoding_ranks) if rank in parts]
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
    assert beside.encoding_ranks == tuple(encoding_ranks_of(drawn, number) for number in range(microbatches))
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


def lists(*words: str) -> Schedule:
    return [[Action.of_word(word) for word in one.split()] for one in words]


SOUND = ("E0.0 E1.0 F0.0 F1.0 B0.0 B1.0 V0.0 V1.0", "E1.1 F0.0 B0.0 F1.0 B1.0 V1.1")
BESIDE = Beside(((0,), (0, 1)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({0: ("E1.0 ", "")}, r"rank 0 never does E\(microbatch 1, rank 0\)"),
        ({1: (" V1.1", "")}, r"rank 1 never does V\(microbatch 1, rank 1\)"),
        ({1: ("E1.1", "E0.1 E1.1")}, r"rank 1 has E\(microbatch 0, rank 1\) but no such work"),
        ({1: ("E1.1", "E1.0")}, r"rank 1 has E\(microbatch 1, rank 0\) but no such work"),
        ({0: ("E1.0", "E1.0 E1.0")}, r"rank 0 has E\(microbatch 1, rank 0\) twice"),
        ({0: ("E0.0 E1.0", "E1.0 E0.0")}, r"rank 0 runs E\(microbatch 0, rank 0\) behind E\(microbatch 1, rank 0\)"),
        ({0: ("V0.0 V1.0", "V1.0 V0.0")}, r"rank 0 runs V\(microbatch 0, rank 0\) behind V\(microbatch 1, rank 0\)"),
        ({0: ("E1.0 F0.0 F1.0", "F0.0 F1.0 E1.0")}, r"waits for ever at F\(microbatch 1, .* for E\(.* of rank 0"),
        ({1: ("E1.1 F0.0 B0.0 F1.0", "F0.0 B0.0 F1.0 E1.1")}, r"waits for ever"),
        ({0: ("B0.0 B1.0 V0.0", "V0.0 B0.0 B1.0")}, r"rank 0 waits for ever at V\(microbatch 0, rank 0\)"),
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
        check_schedule(lists(*SOUND), 2, beside=Beside(BESIDE.encoding_ranks, ahead=True))
    late = lists("F0.0 F1.0 B0.0 E0.0 B1.0 E1.0", "F0.0 B0.0 F1.0 B1.0 E1.1")
    check_schedule(late, 2, beside=Beside(BESIDE.encoding_ranks, ahead=True))


@given(names, st.integers(2, 5), st.integers(1, 9), st.integers(0, 2**31))
def test_first_and_last_is_the_pipeline_between(name: str, ranks: int, microbatches: int, seed: int) -> None:
    schedule = build_schedule(name, ranks, microbatches)
    beside = Beside(drawn_parts(ranks, microbatches, seed))
    for actions in woven(schedule, first_and_last(schedule, beside)):
        phases = ["EFV".index(a.kind) if a.kind in "EV" else 1 for a in actions]
        assert all(one <= other for one, other in pairwise(phases))


@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**31))
def test_any_merging_that_keeps_what_waits_runs(ranks: int, microbatches: int, seed: int) -> None:
    """Drawn places: what check_schedule takes is what an order of all actions exists for, tried out one by one."""
    draw = random.Random(seed)
    schedule = build_schedule("1f1b", ranks, microbatches)
    beside = Beside(drawn_parts(ranks, microbatches, seed))
    places = first_and_last(schedule, beside)
    for rank, actions in enumerate(schedule):
        for row in places[:, rank]:
            row[row >= 0] = sorted(draw.randint(0, len(actions)) for _ in row[row >= 0])
    found = woven(schedule, places)
    if has_order(found, beside):
        check_schedule(found, microbatches, beside=beside)
    else:
        with pytest.raises(UserError, match="waits for ever"):
            check_schedule(found, microbatches, beside=beside)


def has_order(schedule: Schedule, beside: Beside) -> bool:
    """Whether all can be done one by one, each behind what it waits for, on a chunk a rank."""
    last, done, at, moved = len(schedule) - 1, set[tuple[str, int, int]](), [0] * len(schedule), True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            while at[rank] < len(actions):
                kind, m = actions[at[rank]].kind, actions[at[rank]].microbatch
                needs = {
                    "E": [], "V": [("E", m, rank), ("B", m, 0)],
                    "F": [("F", m, rank - 1)] if rank else [("E", m, part) for part in beside.encoding_ranks[m]],
                    "B": [("F", m, rank), *([("B", m, rank + 1)] if rank < last else [])],
                }[kind]  # fmt: skip
                if not done.issuperset(needs):
                    break
                done.add((kind, m, rank))
                at[rank] += 1
                moved = True
    return at == [len(actions) for actions in schedule]
