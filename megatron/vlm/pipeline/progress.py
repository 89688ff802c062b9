"""Where this rank stands in the schedule, said by itself when it has stood there for too long.

A rank that hangs takes all others along: each waits for a neighbour, and the first whose time is up ends the run. So
every rank speaks a little before, while all of them can: which action it is in, which message from whom it waits for.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

from omnibal_ext.actions import Action

SHARE = 0.8
"""Of --distributed-timeout-minutes, after which a rank speaks."""
ACTIONS = {"F": "the forward", "B": "the backward", "W": "the weight gradients"}


class Progress:
    """What a rank is doing, and since when."""

    def __init__(self, timeout: timedelta | None) -> None:
        """timeout: after which torch gives up a message; None: nobody watches."""
        self.patience = SHARE * timeout.total_seconds() if timeout else 0.0
        self._doing, self._since, self._said = "", time.monotonic(), True
        if timeout:
            threading.Thread(target=self._watch, daemon=True).start()

    def at(self, doing: str) -> None:
        """From now on the rank does this."""
        self._doing, self._since, self._said = doing, time.monotonic(), False

    def action(self, action: Action) -> None:
        """From now on the rank is in this action."""
        self.at(f"{ACTIONS[action.kind]} of microbatch {action.microbatch}, chunk {action.chunk}")

    @contextlib.contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """Inside, the rank waits for a message."""
        doing = self._doing
        self.at(f"{doing}, waiting for {message}")
        yield
        self.at(doing)

    def _watch(self) -> None:
        while True:
            time.sleep(self.patience / 20)
            seconds = time.monotonic() - self._since
            if not self._said and seconds > self.patience:
                self._said = True
                rank = os.environ.get("RANK", "0")
                print(
                    f"warning: rank {rank} has been in {self._doing} for {seconds:.0f} s", file=sys.stderr, flush=True
                )
