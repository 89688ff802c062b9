"""Pytest plugin of runs with a fault planted: says which test was begun last, and hurries.

An example that fails is enough, hypothesis need not look for the smallest one. The process may be a fork that has
imported others' modules already (`warm.py`), whose Python is no name that others can start.
"""

import os
import sys
from pathlib import Path

from hypothesis import Phase, settings

settings.register_profile("no shrinking", settings.default, phases=(Phase.explicit, Phase.reuse, Phase.generate))
settings.load_profile("no shrinking")
sys.executable = os.environ.get("REAL_PYTHON", sys.executable)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Runs end with the first test that fails, so the last one that was begun is the one that saw the fault."""
    Path(os.environ["LAST_TEST"]).write_text(nodeid, encoding="utf-8")
