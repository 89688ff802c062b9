"""Schedules: every builder is complete and free of deadlock; bad lists are refused by name."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal_ext.errors import UserError
from omnibal_ext.schedules.actions import Action, Beside, Schedule, check_packs, has_weight_gradients
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
    zero_bubble,
)
from tests.unit.schedules.test_weaving import has_order, lists


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
