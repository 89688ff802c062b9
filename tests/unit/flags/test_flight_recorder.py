"""What NCCL had under way when a message took too long is written down in the run's folder, or where the user says."""

import os
from pathlib import Path

import pytest

from megatron.vlm import platform
from megatron.vlm.arguments import read_arguments
from tests.unit.alone import megatron_alone

COMPLETE = ("--preset", "tiny", "--lr", "1e-3", "--train-iters", "3")
METRICS = ("--metrics-file", "runs/one/metrics.jsonl")


@pytest.mark.parametrize(
    ("cuda", "flags", "wanted"),
    [
        (True, METRICS, "runs/one/nccl_trace_rank_"),
        (True, (*METRICS, "--flight-recorder-dump-path", "/elsewhere/"), "/elsewhere/"),
        (True, (), None),
        (False, METRICS, None),
    ],
)
def test_it_goes_beside_the_metrics(
    cuda: bool, flags: tuple[str, ...], wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "HAS_CUDA", cuda)
    assert read_arguments([*COMPLETE, *flags]).args.flight_recorder_dump_path == wanted


def test_torch_is_told_and_the_user_s_environment_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Megatron, before the first group of ranks is made; by the names of older and newer torch."""
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "77")
    path = str(tmp_path / "nccl_trace_rank_")
    with megatron_alone("tiny", "--flight-recorder-dump-path", path):
        assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == path
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
        assert os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "77"
