"""Schedules: every builder is complete and free of deadlock; bad lists are refused by name."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal_ext.errors import UserError
from omnibal_ext.schedules.actions import Action, Schedule, check_packs, has_weight_gradients
from omnibal_ext.schedules.program import check_schedule
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


def in_flight_limits(schedule: Schedule) -> list[list[int]]:
    """Per rank and chunk: the most microbatches whose activations are held at once."""
    signs = {"F": 1, "W" if has_weight_gradients(schedule) else "B": -1}
    limits = []
    for actions in schedule:
        of_chunks = [[a for a in actions if a.chunk == chunk] for chunk in sorted({a.chunk for a in actions})]
        limits.append([max(itertools.accumulate(signs.get(a.kind, 0) for a in mine)) for mine in of_chunks])
    return limits


@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 6), st.integers(1, 13), st.integers(1, 4))
def test_every_schedule_does_all_work_once_without_deadlock(
    name: str, ranks: int, microbatches: int, chunks: int
) -> None:
    schedule = build_schedule(name, ranks, microbatches, chunks)
    check_schedule(schedule, microbatches, placement_of(name, ranks, chunks))
    check_packs(schedule, chunks)


def test_1f1b_written_out() -> None:
    words = ["".join(a.kind + str(a.microbatch) for a in actions) for actions in one_f_one_b(2, 3)]
    assert words == ["F0F1B0F2B1B2", "F0B0F1B1F2B2"]


@given(st.integers(1, 8), st.integers(1, 12))
def test_1f1b_holds_ranks_minus_stage_microbatches_and_h1_no_more_than_its_first(ranks: int, microbatches: int) -> None:
    wanted = [[min(ranks - s, microbatches)] for s in range(ranks)]
    assert in_flight_limits(one_f_one_b(ranks, microbatches)) == wanted
    assert max(in_flight_limits(zero_bubble(ranks, microbatches))) == wanted[0]


@given(st.integers(1, 6), st.integers(1, 14), st.booleans())
def test_zero_bubble_holds_a_microbatch_or_two_fewer_on_each_later_rank(ranks: int, count: int, h2: bool) -> None:
    """Between F and B; Qi et al. 2023, figures 2 and 3."""
    for rank, actions in enumerate(zero_bubble(ranks, count, extra_in_flight=h2)):
        held = list(itertools.accumulate((a.kind == "F") - (a.kind == "B") for a in actions))
        assert max(held) <= max(1, 2 * (ranks - rank) - 1 if h2 else ranks - rank)


def test_zero_bubble_h2_holds_at_most_twice_and_gpipe_all() -> None:
    assert in_flight_limits(zero_bubble(4, 20, extra_in_flight=True)) == [[7]] * 4
    assert in_flight_limits(gpipe(3, 5)) == [[5]] * 3


def test_interleaved_matches_the_published_order() -> None:
    """Narayanan et al. 2021, figure 4: the first rank of two, with two chunks."""
    first = interleaved_one_f_one_b(2, 4, 2)[0]
    assert [(a.kind, a.microbatch, a.chunk) for a in first[:8]] == [
        ("F", 0, 0), ("F", 1, 0), ("F", 0, 1), ("F", 1, 1), ("F", 2, 0), ("B", 0, 1), ("F", 3, 0), ("B", 1, 1),
    ]  # fmt: skip


def test_a_deadlock_names_rank_and_action() -> None:
    schedule = one_f_one_b(2, 2)
    schedule[0] = [Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1)]
    schedule[1] = [Action("F", 1), Action("B", 1), Action("F", 0), Action("B", 0)]
    with pytest.raises(UserError, match=r"rank 0 waits for ever at B\(microbatch 0, chunk 0\) .* rank 1"):
        check_schedule(schedule, 2)


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
    assert runs == _has_order(schedule)


def _has_order(schedule: list[list[Action]]) -> bool:
    """Repeated passes over all ranks, written without the checker's helpers."""
    ranks, done, at = len(schedule), set(), [0] * len(schedule)
    for _ in range(sum(map(len, schedule)) + 1):
        for r, actions in enumerate(schedule):
            if at[r] < len(actions):
                kind, m = actions[at[r]].kind, actions[at[r]].microbatch
                before = [("F", m, r - 1)] * (r > 0) if kind == "F" else [("F", m, r)]
                before += [("B", m, r + 1)] * (kind == "B" and r < ranks - 1)
                if all(b in done for b in before):
                    done.add((kind, m, r))
                    at[r] += 1
    return all(a == len(actions) for a, actions in zip(at, schedule, strict=True))


def test_lost_doubled_and_foreign_actions_are_named() -> None:
    lost = one_f_one_b(2, 2)
    lost[1].pop()
    with pytest.raises(UserError, match=r"rank 1 never does B\(microbatch 1, chunk 0\)"):
        check_schedule(lost, 2)
    doubled = one_f_one_b(2, 2)
    doubled[0].append(Action("F", 0))
    with pytest.raises(UserError, match=r"rank 0 has F\(microbatch 0, chunk 0\) twice"):
        check_schedule(doubled, 2)
    with pytest.raises(UserError, match="no such work"):
        check_schedule(one_f_one_b(2, 3), 2)


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
    schedule = gpipe(2, 3)
    first, second = (schedule[1].index(Action("F", microbatch)) for microbatch in (0, 1))
    schedule[1][first], schedule[1][second] = schedule[1][second], schedule[1][first]
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
