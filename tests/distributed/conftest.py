"""Runs our programs on gloo ranks."""

import fcntl
from pathlib import Path

import pytest

from tests.programs import PLAIN, result_of, run_ranks


def run_program(module: str, ranks: int, *arguments: str, server: str = PLAIN) -> dict[str, float]:
    """Run a module on gloo ranks; the JSON object of its line that starts with RESULT."""
    result: dict[str, float] = result_of(run_ranks(module, ranks, arguments, server=server))
    return result


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, is_long: bool) -> Path:
    """Loss and gradients of one process, for every question that the cases ask: the first test process asks them."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if hasattr(request.config, "workerinput") else folder  # one of several test processes
    path = folder / "answers"
    with (folder / "answers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            run_program("tests.distributed.parity", 1, "all answers" if is_long else "answers", str(path))
    return path
