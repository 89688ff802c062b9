"""A fault on file, or several, drawn by a seed: the tests see it, whatever has changed since it was filed."""

import subprocess
import sys

import pytest

from tests.programs import ROOT

SEED = 1805


@pytest.mark.starts
def test_a_sample_of_the_faults_dies(is_long: bool) -> None:
    """The short suite has one whose tests are quick."""
    count, words = (16, ["--sample", "16", "--seed", str(SEED)]) if is_long else (1, ["sizes-tokens-from-zero"])
    command = [sys.executable, "tests/mutations/run.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith(f"0 survived of {count}"), done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0
