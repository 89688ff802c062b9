"""Receives are posted so early that transfers overlap, and never so early that a synchronisation could hang."""

from collections import deque
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal_ext.schedules.actions import Action, Beside, check_packs
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import Post, Postings, check_schedule, with_posts
from omnibal_ext.schedules.schedule import SCHEDULE_NAMES, build_schedule, placement_of
from omnibal_ext.schedules.weaving import first_and_last, in_time, woven
from tests.unit.drawn import drawn_lists, drawn_parts, placements


@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 6), st.integers(1, 13), st.integers(1, 4))
def test_every_schedule_ends_though_each_rank_waits_at_every_step_for_all_it_has_posted(
    name: str, ranks: int, microbatches: int, chunks: int
) -> None:
    """So does an evaluation, which runs only the forwards. Actions stay in order, and each tensor from elsewhere is
    posted once, before its action."""
    schedule, placement = build_schedule(name, ranks, microbatches, chunks), placement_of(name, ranks, chunks)
    check_schedule(schedule, microbatches, placement)
    check_packs(schedule, chunks)
    postings = with_posts(schedule, microbatches, placement)
    assert ends_when_everything_blocks(postings, placement)
    assert ends_when_everything_blocks([[item for item in items if item.kind == "F"] for items in postings], placement)
    for rank, items in enumerate(postings):
        assert [item for item in items if isinstance(item, Action)] == schedule[rank]
        posts = [item.action for item in items if isinstance(item, Post)]
        assert sorted(map(str, posts)) == sorted(str(a) for a in schedule[rank] if takes(a, rank, placement))
        for number, item in enumerate(items):
            if isinstance(item, Post):
                assert number < items.index(item.action)
                giver, given = item.giver
                assert giver != rank
                assert (given.kind, given.microbatch) == (item.action.kind, item.action.microbatch)
                assert given in schedule[giver]


@given(placements, st.integers(1, 7), st.integers(0, 2**31))
def test_lists_in_any_order_end_too_and_receives_are_posted_in_the_order_of_their_senders(
    placement: Placement, microbatches: int, seed: int
) -> None:
    """What comes over a channel is what was sent first, so neighbours need no order in common."""
    schedule = drawn_lists(placement, microbatches, seed)
    postings = with_posts(schedule, microbatches, placement)
    assert ends_when_everything_blocks(postings, placement)
    ranks_of, ranks = placement.ranks_of, placement.ranks
    for rank, source, (kind, step) in product(range(ranks), range(ranks), (("F", 1), ("B", -1))):
        sent = [
            (a.microbatch, stage + step)
            for a in schedule[source]
            if a.kind == kind
            and source != rank
            and 0 <= (stage := [s for s, r in enumerate(ranks_of) if r == source][a.chunk]) + step < len(ranks_of)
            and ranks_of[stage + step] == rank
        ]
        taken = [item.action for item in postings[rank] if isinstance(item, Post) and item.kind == kind]
        stages = [[s for s, r in enumerate(ranks_of) if r == rank][a.chunk] for a in taken]
        received = [(a.microbatch, s) for a, s in zip(taken, stages, strict=True) if ranks_of[s - step] == source]
        assert received == sent


@given(placements, st.integers(1, 6), st.integers(0, 2**31), st.booleans(), st.booleans())
def test_lists_with_a_tower_end_too_and_each_part_is_posted_once(
    placement: Placement, microbatches: int, seed: int, late: bool, ahead: bool
) -> None:
    """Blocking sends and receives, pair by pair; what E make ahead is received though no F of this list takes it."""
    beside = Beside(drawn_parts(placement.ranks, microbatches, seed), ahead)
    schedule = drawn_lists(placement, microbatches, seed)
    insertions = in_time(schedule, microbatches, placement, beside) if late else first_and_last(schedule, beside)
    schedule = woven(schedule, insertions)
    postings = with_posts(schedule, microbatches, placement)
    assert [[a for a in items if isinstance(a, Action)] for items in postings] == schedule
    assert ends_when_everything_blocks(postings, placement, beside)
    first, chunk = placement.rank_and_chunk(0)
    of_parts = [
        item for items in postings for item in items
        if isinstance(item, Post) and (item.kind == "V" or item.giver[1].kind == "E")
    ]  # fmt: skip
    expected = []
    for m, ranks in enumerate(beside.encoding_ranks):
        for part in ranks:
            if part != first:
                expected.append(Post(Action("F", m, chunk), (part, Action("E", m, part))))
                expected += [] if ahead else [Post(Action("V", m, part), (first, Action("B", m, chunk)))]
    assert sorted(map(str, of_parts)) == sorted(map(str, expected))


@pytest.mark.parametrize("ranks", [2, 4])
def test_posting_one_action_ahead_would_hang(ranks: int) -> None:
    """The check itself can fail: what the executor did before."""
    schedule, placement = build_schedule("1f1b", ranks, 8), Placement.interleaved(ranks)
    early = [one_ahead(actions, rank, placement) for rank, actions in enumerate(schedule)]
    assert not ends_when_everything_blocks(early, placement)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_few_tensors_are_held_before_they_are_used(name: str) -> None:
    """A receive that is posted holds its memory: of one kind at most two wait, but in GPipe, which hoards anyway."""
    for items in with_posts(build_schedule(name, 4, 32), 32):
        for kind in "FB":
            waiting = most = 0
            for item in items:
                if item.kind == kind:
                    waiting += 1 if isinstance(item, Post) else -1
                    most = max(most, waiting)
            assert most <= (2 if name != "gpipe" else 32)


def other_end(action: Action, rank: int, placement: Placement, step: int) -> int:
    """The stage of another rank so many further on; -1 where there is none."""
    stage = [s for s, r in enumerate(placement.ranks_of) if r == rank][action.chunk]
    inside = 0 <= stage + step < placement.stages
    return stage + step if inside and placement.ranks_of[stage + step] != rank else -1


def takes(action: Action, rank: int, placement: Placement) -> bool:
    """Whether the action needs a tensor of another rank."""
    return other_end(action, rank, placement, {"F": -1, "B": 1, "W": 0}[action.kind]) >= 0


def ends_when_everything_blocks(postings: Postings, placement: Placement, beside: Beside | None = None) -> bool:
    """Play: sends and receives are blocking calls that both sides must have reached, the strictest transport there is.

    A rank at a send is stuck until the receiver stands at the matching post, and the other way round.
    """
    left = [deque(_words(items, rank, placement, beside)) for rank, items in enumerate(postings)]
    moved = True
    while moved:
        moved = False
        for words in left:
            while words and words[0] is None:
                words.popleft()
                moved = True
        for rank, words in enumerate(left):
            here = words[0] if words else None
            if here is None or here[0] != "send":
                continue
            if left[here[1]] and left[here[1]][0] == ("take", rank, here[2]):
                words.popleft()
                left[here[1]].popleft()
                moved = True
    return not any(left)


Word = tuple[str, int, tuple[str, int, int]]
"""Send or take, the other rank, and the tensor: the kind of action that takes it, its microbatch, its stage or part."""


def _words(items: Sequence[Action | Post], rank: int, placement: Placement, beside: Beside | None) -> list[Word | None]:
    """What a rank calls: None to compute, else a send or a take."""
    words: list[Word | None] = []
    first = placement.ranks_of[0]
    for item in items:
        if isinstance(item, Post):
            action = item.action
            if action.kind == "V":
                words.append(("take", first, ("V", action.microbatch, rank)))
                continue
            stage = placement.stages_of[rank][action.chunk]
            step = {"F": -1, "B": 1}[action.kind]
            giver = item.giver[0] if stage + step < 0 else placement.ranks_of[stage + step]
            words.append(("take", giver, (action.kind, action.microbatch, stage)))
            continue
        words.append(None)
        if item.kind == "E":
            words += [("send", first, ("F", item.microbatch, 0))] * (rank != first)
        elif item.kind == "B" and beside and placement.stages_of[rank][item.chunk] == 0:
            parts = () if beside.ahead else beside.encoding_ranks[item.microbatch]
            words += [("send", part, ("V", item.microbatch, part)) for part in parts if part != rank]
        elif item.kind in "FB":
            target = other_end(item, rank, placement, {"F": 1, "B": -1}[item.kind])
            if target >= 0:
                words.append(("send", placement.ranks_of[target], (item.kind, item.microbatch, target)))
    return words


def one_ahead(actions: list[Action], rank: int, placement: Placement) -> list[Action | Post]:
    """Each receive is posted before the action before its own."""
    items: list[Action | Post] = []
    posted: set[Action] = set()
    for action, following in zip(actions, [*actions[1:], None], strict=True):
        for wanted in (action, following):
            if wanted is not None and wanted not in posted and takes(wanted, rank, placement):
                posted.add(wanted)
                stage = other_end(wanted, rank, placement, {"F": -1, "B": 1}[wanted.kind])
                giver, chunk = placement.rank_and_chunk(stage)
                items.append(Post(wanted, (giver, Action(wanted.kind, wanted.microbatch, chunk))))
        items.append(action)
    return items
