"""What all tests share: those that only `scripts/test.sh --long` runs, compiling, garbage."""

import gc
import os

import pytest

from tests import programs
from tests.compiling import compile_in_turn

GARBAGE = 20_000
"""Objects that are made before those in circles are looked for: Python's own 700 cost a tenth of a test's time."""
compile_in_turn()
gc.disable()  # while tests are collected; what they import stays


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare --long."""
    parser.addoption("--long", action="store_true", help="with the tests marked long: whole grids, all families")


def pytest_configure(config: pytest.Config) -> None:
    """All processes of one start of the tests share what forks for them."""
    if hasattr(config, "workerinput"):
        programs.owner = os.getppid()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --long, tests that are marked so are left out."""
    if not config.getoption("--long"):
        left_out = [item for item in items if item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_collection_finish() -> None:
    """Nothing that was imported is looked through for garbage again: not by any test, and not at the end."""
    gc.freeze()
    gc.set_threshold(GARBAGE)
    gc.enable()


@pytest.fixture(scope="session")
def is_long(pytestconfig: pytest.Config) -> bool:
    """Whether --long was given: what is drawn at random is then drawn more often."""
    return bool(pytestconfig.getoption("--long"))
