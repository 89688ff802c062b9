"""Waiting in tests, for what comes at once on an idle machine and late on a busy one."""

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 300.0
"""Seconds after which what a test waits for is taken never to come."""


def until(found: Callable[[], Any], what: str) -> Any:
    """What `found` returns, once that is true. Fails, naming `what` was waited for, if it never is."""
    limit = time.monotonic() + PATIENCE
    while not (answer := found()):
        assert time.monotonic() < limit, f"waited in vain for {what}"
        time.sleep(0.01)
    return answer
