"""Warning of a rank that has been in one action for too long.

If one rank hangs, all others wait for a neighbour, and the first timeout ends the run. So each rank prints a line
shortly before: its action, and the message it waits for, with the other rank and that rank's host.

Only on the CPU does the host itself wait for messages. On a GPU the host queues an iteration long before the device is
done: an event is recorded after every action, and the rank is in the first action whose event has not been reached.
"""

import contextlib
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from megatron.vlm.platform import Moment
from omnibal_ext.output import say
from omnibal_ext.schedules.actions import OF_TOWER, Action

SHARE = 0.8
"""Share of --distributed-timeout-minutes after which a rank prints its line."""
LOOKS = 20
"""Number of times that a rank's step is looked at in that share."""
ACTIONS = {
    "F": "the forward", "B": "the backward", "W": "the weight gradients",
    "E": "the encoding of images", "V": "the backward of images",
}  # fmt: skip


@dataclass(eq=False)
class Step:
    """What a rank is doing, in words. On a GPU the host is done with it long before the device."""

    doing: str
    end: Moment | None = None
    """Moment after all that the host gave the device in this step; None: the host is still in it."""

    @property
    def passed(self) -> bool:
        """Whether the device has finished this step too; does not wait."""
        return self.end is not None and self.end.reached()


class Progress:
    """A record of what this rank is doing; a thread prints a warning when one step takes too long."""

    def __init__(self, timeout: timedelta | None) -> None:
        """Start the thread. A step may take 0.8 of `timeout`, torch's for a message; None: nothing is watched."""
        self.patience = SHARE * timeout.total_seconds() if timeout else 0.0
        self._steps: deque[Step] = deque()
        """Steps that the device has not finished, in order; the last is the host's."""
        if timeout:
            threading.Thread(target=_watch, args=(weakref.ref(self), self.patience), daemon=True).start()

    def at(self, doing: str) -> None:
        """Note what the rank is `doing` from now on, in words for the warning."""
        if self._steps:
            self._steps[-1].end = Moment()
        self._steps.append(Step(doing))
        while self._steps[0].passed:
            self._steps.popleft()

    def action(self, action: Action) -> None:
        """Note that the rank runs this action of its schedule from now on."""
        step = "rank" if action.kind in OF_TOWER else "chunk"
        self.at(f"{ACTIONS[action.kind]} of microbatch {action.microbatch}, {step} {action.chunk}")

    @contextlib.contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """Make a context in which the rank is noted as waiting for `message`: what, from whom or to whom."""
        doing = self._steps[-1].doing if self._steps else "the start"
        self.at(f"{doing}, waiting for {message}")
        yield
        self.at(doing)

    def step(self) -> Step | None:
        """Return the oldest thing noted by `at` (an action, or a wait for a message) that the device has not finished.

        None before the first call of `at`. Any thread may call it.
        """
        return next((step for step in tuple(self._steps) if not step.passed), None)


def _watch(watched: "weakref.ref[Progress]", patience: float) -> None:
    """Warn once of each step that has taken `patience` seconds, until `watched` is deleted."""
    last, since, said = None, 0.0, False
    while True:
        time.sleep(patience / LOOKS)
        if (progress := watched()) is None:
            return
        step, seconds = progress.step(), time.monotonic() - since
        del progress
        if step is not last:
            last, since, said = step, time.monotonic(), False
        elif step is not None and not said and seconds > patience:
            said, name = True, name_of_rank(os.environ.get("RANK", "0"))
            say(f"warning: {name} has been in {step.doing} for {seconds:.0f} s", error=True)


def name_of_rank(rank: int | str) -> str:
    """Return "rank 3 on HOST" of a rank that runs on this machine."""
    return f"rank {rank} on {socket.gethostname()}"
