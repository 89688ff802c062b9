"""A rank that stands still says where, once; one that goes on says nothing."""

import time
from datetime import timedelta

import pytest

from megatron.vlm.pipeline.progress import Progress
from omnibal_ext.actions import Action


def said_after(capsys: pytest.CaptureFixture[str], words: str) -> str:
    """What is on stderr once these words are."""
    said, limit = "", time.monotonic() + 20
    while words not in said and time.monotonic() < limit:
        time.sleep(0.01)
        said += capsys.readouterr().err
    return said


def test_who_waits_too_long_says_for_what_and_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    progress = Progress(timedelta(seconds=0.5))
    progress.action(Action("B", 4, 1))
    with progress.waiting("its gradient from rank 7"):
        said = said_after(capsys, "rank 7")
        place = "the backward of microbatch 4, chunk 1, waiting for its gradient from rank 7"
        assert said.startswith(f"warning: rank 3 has been in {place} for ")
        time.sleep(0.3)
        assert capsys.readouterr().err == ""
    assert "the backward of microbatch 4, chunk 1 for" in said_after(capsys, "chunk 1 for")


def test_who_goes_on_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(timedelta(seconds=2.0))
    for microbatch in range(40):
        progress.action(Action("F", microbatch, 0))
        time.sleep(0.05)
    assert capsys.readouterr().err == ""
