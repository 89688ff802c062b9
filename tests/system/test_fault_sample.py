"""Faults on file, drawn by a seed: the tests see them, whatever has changed since they were filed."""

import subprocess
import sys

import pytest

from tests.programs import ROOT

SEED = 1805


@pytest.mark.long
@pytest.mark.starts
def test_a_sample_of_the_faults_dies() -> None:
    command = [sys.executable, "tests/mutations/run.py", "--sample", "16", "--seed", str(SEED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("0 survived of 16"), done.stdout[-4000:] + done.stderr[-4000:]
    assert done.returncode == 0
