"""Runs our programs under torchrun."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Program = Callable[..., dict[str, float]]


def run_program(module: str, ranks: int, *arguments: str) -> dict[str, float]:
    """Run a module on gloo ranks; the JSON object of its line that starts with RESULT."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", module]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(lines) == 1, done.stdout[-4000:]
    result: dict[str, float] = json.loads(lines[0].removeprefix("RESULT "))
    return result


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loss and gradients of one process, for every question that the cases ask."""
    path = tmp_path_factory.mktemp("answers") / "answers.pt"
    run_program("tests.distributed.parity", 1, "answers", str(path))
    return path
