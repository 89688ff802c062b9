"""A rank that raises inside `single_process` is heard, and nobody waits for it: waiting would end at the time limit."""

import subprocess

import pytest

from tests.programs import ROOT, environment, warm_interpreter


@pytest.mark.parametrize("where", ["collective", "end"])
def test_an_error_on_one_rank_ends_all_and_is_shown(where: str) -> None:
    command = [warm_interpreter(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, "-m", "tests.distributed.raises", where],
        cwd=ROOT, env=environment(),
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "ValueError: rank 1 has no weights" in done.stderr
