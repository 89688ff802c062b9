"""Receives are posted so early that transfers overlap, and never so early that a synchronisation could hang."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnibal_ext.errors import UserError
from omnibal_ext.posting import Post, Postings, with_posts
from omnibal_ext.schedule import SCHEDULE_NAMES, Action, Schedule, build_schedule

Send = tuple[str, int, int]
"""Kind, microbatch, and the global stage that takes it."""


@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 6), st.integers(1, 13), st.integers(1, 4))
def test_every_schedule_ends_though_each_rank_waits_at_every_step_for_all_it_has_posted(
    name: str, ranks: int, microbatches: int, chunks: int
) -> None:
    postings = with_posts(build_schedule(name, ranks, microbatches, chunks), microbatches, chunks)
    assert ends_when_everything_blocks(postings, chunks)


@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 6), st.integers(1, 13), st.integers(1, 4))
def test_evaluation_which_runs_only_the_forwards_ends_too(
    name: str, ranks: int, microbatches: int, chunks: int
) -> None:
    postings = with_posts(build_schedule(name, ranks, microbatches, chunks), microbatches, chunks)
    assert ends_when_everything_blocks([[item for item in items if item.kind == "F"] for items in postings], chunks)


@given(st.sampled_from(SCHEDULE_NAMES), st.integers(1, 6), st.integers(1, 13), st.integers(1, 4))
def test_the_order_of_actions_stays_and_each_tensor_from_elsewhere_is_posted_once_before_its_action(
    name: str, ranks: int, microbatches: int, chunks: int
) -> None:
    schedule = build_schedule(name, ranks, microbatches, chunks)
    for rank, items in enumerate(with_posts(schedule, microbatches, chunks)):
        assert [item for item in items if isinstance(item, Action)] == schedule[rank]
        posts = [item.action for item in items if isinstance(item, Post)]
        assert sorted(map(str, posts)) == sorted(str(a) for a in schedule[rank] if takes(a, rank, ranks, chunks))
        for post in posts:
            assert items.index(Post(post)) < items.index(post)


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 3), st.integers(0, 2**31))
def test_lists_in_any_order_end_too_and_receives_are_posted_in_the_order_of_their_senders(
    ranks: int, microbatches: int, chunks: int, seed: int
) -> None:
    """What comes over a channel is what was sent first, so neighbours need no order in common."""
    schedule = drawn_lists(ranks, microbatches, chunks, seed)
    postings = with_posts(schedule, microbatches, chunks)
    assert ends_when_everything_blocks(postings, chunks)
    for rank, items in enumerate(postings):
        for kind, step in (("F", 1), ("B", -1)):
            source = (rank - step) % ranks
            goes = {"F": range(ranks * chunks - 1), "B": range(1, ranks * chunks)}[kind]
            sent = [
                (a.microbatch, a.chunk * ranks + source + step)
                for a in schedule[source]
                if a.kind == kind and a.chunk * ranks + source in goes and ranks > 1
            ]
            posts = [item.action for item in items if isinstance(item, Post) and item.kind == kind]
            assert [(a.microbatch, a.chunk * ranks + rank) for a in posts] == sent


def drawn_lists(ranks: int, microbatches: int, chunks: int, seed: int) -> Schedule:
    """Any order in which all actions can be done, one by one, dealt to their ranks."""
    draw, stages = random.Random(seed), ranks * chunks
    ready = [("F", m, 0) for m in range(microbatches)]
    done: set[tuple[str, int, int]] = set()
    lists: Schedule = [[] for _ in range(ranks)]
    while ready:
        kind, m, stage = ready.pop(draw.randrange(len(ready)))
        done.add((kind, m, stage))
        lists[stage % ranks].append(Action(kind, m, stage // ranks))
        if kind == "F" and stage < stages - 1:
            ready.append(("F", m, stage + 1))
        if kind == "B":
            ready.append(("W", m, stage))
        turned = stage if kind == "F" and stage == stages - 1 else stage - 1 if kind == "B" else None
        if turned is not None and turned >= 0:
            ready.append(("B", m, turned))
    return lists


@pytest.mark.parametrize("ranks", [2, 4])
def test_posting_one_action_ahead_would_hang(ranks: int) -> None:
    """The check itself can fail: what the executor did before."""
    schedule = build_schedule("1f1b", ranks, 8)
    assert not ends_when_everything_blocks(
        [one_ahead(actions, rank, ranks) for rank, actions in enumerate(schedule)], 1
    )


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


def takes(action: Action, rank: int, ranks: int, chunks: int) -> bool:
    """Whether the action needs a tensor of another rank."""
    stage = action.chunk * ranks + rank
    return ranks > 1 and stage != {"F": 0, "B": ranks * chunks - 1, "W": stage}[action.kind]


def ends_when_everything_blocks(postings: Postings, chunks: int) -> bool:
    """Play: sends and receives are blocking calls that both sides must have reached, the strictest transport there is.

    A rank at a send is stuck until the receiver stands at the matching post, and the other way round.
    """
    ranks = len(postings)
    words = [_words(items, rank, ranks, chunks) for rank, items in enumerate(postings)]
    at = [0] * ranks
    moved = True
    while moved:
        moved = False
        for rank in range(ranks):
            while at[rank] < len(words[rank]) and words[rank][at[rank]] is None:
                at[rank] += 1
                moved = True
        for rank in range(ranks):
            here = words[rank][at[rank]] if at[rank] < len(words[rank]) else None
            if here is None or here[0] != "send":
                continue
            other = here[1][2] % ranks
            if at[other] < len(words[other]) and words[other][at[other]] == ("take", here[1]):
                at[rank] += 1
                at[other] += 1
                moved = True
    return all(position == len(words[rank]) for rank, position in enumerate(at))


def _words(items: Sequence[Action | Post], rank: int, ranks: int, chunks: int) -> list[tuple[str, Send] | None]:
    """What a rank calls: None to compute, ("send", tensor), ("take", tensor)."""
    last, words = ranks * chunks - 1, []
    for item in items:
        if isinstance(item, Post):
            words.append(("take", (item.kind, item.action.microbatch, item.action.chunk * ranks + rank)))
            continue
        words.append(None)
        stage = item.chunk * ranks + rank
        target = {"F": stage + 1, "B": stage - 1, "W": -1}[item.kind]
        if 0 <= target <= last and ranks > 1:
            words.append(("send", (item.kind, item.microbatch, target)))
    return words


def one_ahead(actions: list[Action], rank: int, ranks: int) -> list[Action | Post]:
    """Each receive is posted before the action before its own."""
    items: list[Action | Post] = []
    posted: set[Action] = set()
    for action, following in zip(actions, [*actions[1:], None], strict=True):
        for wanted in (action, following):
            if wanted is not None and wanted not in posted and takes(wanted, rank, ranks, 1):
                posted.add(wanted)
                items.append(Post(wanted))
        items.append(action)
    return items


def test_a_schedule_that_deadlocks_is_refused() -> None:
    schedule: Schedule = [[Action("B", 0), Action("F", 0)], [Action("F", 0), Action("B", 0)]]
    with pytest.raises(UserError, match="waits for ever"):
        with_posts(schedule, 1)
