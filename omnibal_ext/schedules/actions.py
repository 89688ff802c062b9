"""What pipeline ranks do, as plain data: for every rank, the list of its actions, in order; and what a list must be.

A stage is one contiguous slice of the layer chain; a `Placement` says which (rank, chunk) it is.

An action waits for: F, the forward of its microbatch one stage earlier; B, that forward here and the backward one stage
later; W, the backward here. In lists without W, B computes the gradients of inputs and of weights together.
"""

import re
from collections import defaultdict, deque
from dataclasses import dataclass

from omnibal_ext.errors import UserError
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.playing import Item


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank: `kind` is "F" forward, "B" backward, "W" gradient of the weights where B leaves it out."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}(microbatch {self.microbatch}, chunk {self.chunk})"

    @property
    def word(self) -> str:
        """As plan.json has it: "B3.1" is the backward of microbatch 3 in chunk 1."""
        return f"{self.kind}{self.microbatch}.{self.chunk}"

    @classmethod
    def of_word(cls, word: str) -> "Action":
        """Read `word`. Raises UserError for any other text."""
        found = re.fullmatch(r"([FBW])(\d{1,9})\.(\d{1,9})", word, re.ASCII)
        if found is None:
            raise UserError(f"{word[:40]!r} is no action; write F, B or W, the microbatch, a dot and the chunk: B3.1")
        return cls(found[1], int(found[2]), int(found[3]))


Schedule = list[list[Action]]


def of_items(lists: list[list[Item]]) -> Schedule:
    """The schedule of (kind, microbatch, chunk) lists."""
    return [[Action(*item) for item in items] for items in lists]


def has_weight_gradients(schedule: Schedule) -> bool:
    """True where the backward is split into B (inputs) and W (weights)."""
    return any(action.kind == "W" for action in schedule[0])


def counts_of(schedule: Schedule) -> tuple[int, int, int]:
    """Of how many ranks, microbatches and chunks lists of actions are."""
    actions = [action for actions in schedule for action in actions]
    return len(schedule), 1 + max(a.microbatch for a in actions), 1 + max(a.chunk for a in actions)


def in_flight_limits(schedule: Schedule) -> list[list[int]]:
    """Per rank and chunk: the most microbatches whose activations are held at once (at the rank's own peak)."""
    release = "W" if has_weight_gradients(schedule) else "B"
    limits = []
    for actions in schedule:
        held: dict[int, int] = defaultdict(int)
        most: dict[int, int] = defaultdict(int)
        for action in actions:
            held[action.chunk] += (action.kind == "F") - (action.kind == release)
            most[action.chunk] = max(most[action.chunk], held[action.chunk])
        limits.append([most[chunk] for chunk in range(max(most, default=0) + 1)])
    return limits


def check_schedule(schedule: Schedule, microbatches: int, placement: Placement | None = None) -> list[tuple[int, int]]:
    """Refuse a schedule that loses or doubles work or would deadlock; return a valid order as (rank, position) pairs.

    Without a placement every rank has one stage. Raises UserError naming the rank and the action.
    """
    placement = placement or Placement.interleaved(len(schedule))
    chunks = placement.chunks
    kinds = ("F", "B", "W") if any(a.kind == "W" for actions in schedule for a in actions) else ("F", "B")
    wanted = {Action(kind, m, c) for kind in kinds for m in range(microbatches) for c in range(chunks)}
    for rank, actions in enumerate(schedule):
        seen: set[Action] = set()
        for action in actions:
            if action not in wanted or action in seen:
                raise UserError(
                    f"schedule: rank {rank} has {action} {'twice' if action in seen else 'but no such work'}"
                )
            seen.add(action)
        if seen != wanted:
            missing = min(wanted - seen, key=lambda a: (a.microbatch, a.chunk, kinds.index(a.kind)))
            raise UserError(f"schedule: rank {rank} never does {missing}")
    return _dependency_order(schedule, placement)


def check_packs(schedule: Schedule, chunks: int = 1) -> None:
    """Refuse a schedule that takes packs in another order than they come: in each chunk from microbatch 0 up.

    In all else ranks are free: receives are posted in the order of their sender (`omnibal_ext.schedules.posting`).
    Raises UserError naming rank and action.
    """
    for rank, actions in enumerate(schedule):
        awaited = [0] * chunks
        for action in actions:
            if action.kind == "F":
                if action.microbatch != awaited[action.chunk]:
                    raise UserError(
                        f"schedule: rank {rank} runs {action} where the pack of microbatch {awaited[action.chunk]} "
                        "comes; put the forwards of a chunk in the order of microbatches"
                    )
                awaited[action.chunk] += 1


def giver(action: Action, rank: int, placement: Placement) -> tuple[int, Action] | None:
    """Who makes the tensor that an action takes: (rank, action) of the stage before for F, of the next one for B."""
    return _of_neighbour(action, rank, placement, {"F": -1, "B": 1, "W": 0}[action.kind])


def taker(action: Action, rank: int, placement: Placement) -> tuple[int, Action] | None:
    """Who takes the tensor that an action makes: (rank, action) of the next stage for F, of the one before for B."""
    return _of_neighbour(action, rank, placement, {"F": 1, "B": -1, "W": 0}[action.kind])


def dependencies(action: Action, rank: int, placement: Placement) -> list[tuple[int, Action]]:
    """What an action waits for besides the rank's own list order: (rank, action) pairs."""
    before = {"F": None, "B": "F", "W": "B"}[action.kind]
    own = [] if before is None else [(rank, Action(before, action.microbatch, action.chunk))]
    given = giver(action, rank, placement)
    return own if given is None else [*own, given]


def _of_neighbour(action: Action, rank: int, placement: Placement, step: int) -> tuple[int, Action] | None:
    """The same kind of action so many stages further on, and its rank; None beyond the chain's ends."""
    stage = placement.stages_of[rank][action.chunk] + step
    if not step or not 0 <= stage < placement.stages:
        return None
    where, chunk = placement.rank_and_chunk(stage)
    return where, Action(action.kind, action.microbatch, chunk)


def _dependency_order(schedule: Schedule, placement: Placement) -> list[tuple[int, int]]:
    """Let every rank run as far as it can until all are done; a rank resumes when what it waited for is done."""
    ranks = len(schedule)
    position = [0] * ranks
    done: set[tuple[int, Action]] = set()
    waiting: dict[tuple[int, Action], list[int]] = defaultdict(list)
    order: list[tuple[int, int]] = []
    ready = deque(range(ranks))
    while ready:
        rank = ready.popleft()
        while position[rank] < len(schedule[rank]):
            action = schedule[rank][position[rank]]
            missing = next((d for d in dependencies(action, rank, placement) if d not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            done.add((rank, action))
            order.append((rank, position[rank]))
            position[rank] += 1
            ready.extend(waiting.pop((rank, action), ()))
    for rank, actions in enumerate(schedule):
        if position[rank] < len(actions):
            action = actions[position[rank]]
            other, needed = next(d for d in dependencies(action, rank, placement) if d not in done)
            raise UserError(
                f"schedule deadlocks: rank {rank} waits for ever at {action} for {needed} of rank {other}; "
                "put that earlier in its list"
            )
    return order
