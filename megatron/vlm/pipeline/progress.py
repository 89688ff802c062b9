"""Where this rank stands in the schedule, said by itself when it has stood there for too long.

A rank that hangs takes all others along: each waits for a neighbour, and the first whose time is up ends the run. So
every rank speaks a little before, while all of them can: which action it is in, which message from whom it waits for.

The host waits for messages on the CPU alone. On a GPU it hands out an iteration and stands behind it long before its
device does: a moment of the device is kept behind every place, and the rank stands at the first that is not reached.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from megatron.vlm.platform import Moment
from omnibal_ext.output import say
from omnibal_ext.schedules.actions import VISION, Action

SHARE = 0.8
"""Of --distributed-timeout-minutes, after which a rank speaks."""
LOOKS = 20
"""How often it is looked meanwhile."""
ACTIONS = {
    "F": "the forward", "B": "the backward", "W": "the weight gradients",
    "E": "the encoding of images", "V": "the backward of images",
}  # fmt: skip


@dataclass(eq=False)
class Place:
    """Something that a rank does; on a GPU first its host, then its device."""

    doing: str
    end: Moment | None = None
    """Behind all that the device was given here; None: the host is still here."""

    @property
    def passed(self) -> bool:
        """Whether the device is through with it too; asks without waiting."""
        return self.end is not None and self.end.reached()


class Progress:
    """What a rank is doing, and since when."""

    def __init__(self, timeout: timedelta | None) -> None:
        """timeout: after which torch gives up a message; None: nobody watches."""
        self.patience = SHARE * timeout.total_seconds() if timeout else 0.0
        self._places: deque[Place] = deque()
        """Where the host has been and the device has not, in order; the last is where the host is."""
        if timeout:
            threading.Thread(target=self._watch, daemon=True).start()

    def at(self, doing: str) -> None:
        """From now on the rank is given this to do."""
        if self._places:
            self._places[-1].end = Moment()
        self._places.append(Place(doing))
        while self._places[0].passed:
            self._places.popleft()

    def action(self, action: Action) -> None:
        """From now on the rank is in this action."""
        place = "part" if action.kind in VISION else "chunk"
        self.at(f"{ACTIONS[action.kind]} of microbatch {action.microbatch}, {place} {action.chunk}")

    @contextlib.contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """Inside, the rank waits for a message."""
        doing = self._places[-1].doing if self._places else "the start"
        self.at(f"{doing}, waiting for {message}")
        yield
        self.at(doing)

    def place(self) -> Place | None:
        """Where the rank stands; None before it has begun. Any thread may ask."""
        return next((place for place in tuple(self._places) if not place.passed), None)

    def _watch(self) -> None:
        last, since, said = None, 0.0, False
        while True:
            time.sleep(self.patience / LOOKS)
            place, seconds = self.place(), time.monotonic() - since
            if place is not last:
                last, since, said = place, time.monotonic(), False
            elif place is not None and not said and seconds > self.patience:
                said, rank = True, os.environ.get("RANK", "0")
                say(f"warning: rank {rank} has been in {place.doing} for {seconds:.0f} s", error=True)
