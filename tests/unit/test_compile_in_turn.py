"""Processes that need the same compiled function at the same time: one compiles it."""

import subprocess
import sys
from pathlib import Path

from tests.programs import ROOT, environment
from tests.waiting import PATIENCE

FUNCTION = "import numba\n\n@numba.njit(cache=True)\ndef twice(n):\n    return 2 * n if n < 9 else twice(n - 1)\n"
RUN = (
    "from compiling import compile_in_turn\ncompile_in_turn()\ncompile_in_turn()\nimport made\n"
    "assert made.twice(3) == 6\nprint(sum(made.twice.stats.cache_misses.values()))"
)


def test_one_of_four_compiles(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(FUNCTION)
    # Without `tests`, which imports Megatron.
    words, found = [sys.executable, "-c", RUN], environment(PYTHONPATH=f"{ROOT}/tests:{tmp_path}")
    started = [subprocess.Popen(words, env=found, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=PATIENCE)[0] for process in started]
    assert sorted(map(int, said)) == [0, 0, 0, 1]
