"""What a machine is taken for: optional accelerators count where they can be used, and not where they cannot."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.vlm import platform
from tests.programs import ROOT, environment

ASK = """
import megatron.vlm
from megatron.core import optimizer
print(optimizer.USING_PYTORCH_OPTIMIZER, optimizer.Adam.__module__)
"""


@pytest.mark.starts
def test_an_apex_without_kernels_is_not_used(tmp_path: Path) -> None:
    """It can be imported, and Megatron would take its optimizer, which raises when it is built."""
    (tmp_path / "apex/optimizers").mkdir(parents=True)
    (tmp_path / "apex/__init__.py").touch()
    kernels = "class FusedAdam:\n    def __init__(self, *_, **__): raise RuntimeError('requires cuda extensions')\n"
    (tmp_path / "apex/optimizers/__init__.py").write_text(kernels + "FusedSGD = FusedAdam\n")
    asked = [sys.executable, "-W", "ignore", "-c", ASK]
    done = subprocess.run(
        asked, env=environment(PYTHONPATH=f"{ROOT}:{tmp_path}"), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "torch.optim.adamw"]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_hosts_talk_while_devices_compute(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the default group where that is the hosts' already, and never without end."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **how: made.append(how) or how)
    group = platform.host_group(timedelta(minutes=3))
    assert (group is None) == (backend == "gloo") == (not made)
    assert all((how["backend"], how["timeout"]) == ("gloo", timedelta(minutes=3)) for how in made)
    assert not any(how.get("ranks") for how in made), "all ranks"
