"""A rank that stands still says where, once, by its device; one that goes on says nothing."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from megatron.vlm.pipeline import progress as module
from megatron.vlm.pipeline.progress import Progress
from omnibal_ext.schedules.actions import Action
from tests.waiting import PATIENCE, until

HOST = socket.gethostname()


class Device:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked = self.reached = 0
        patch.setattr(module, "Moment", self.moment)

    def moment(self) -> "Moment":
        self.asked += 1
        return Moment(self, self.asked)


class Moment:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number

    def reached(self) -> bool:
        return self.number <= self.device.reached


@pytest.fixture
def watched() -> Iterator["Watched"]:
    made: list[Progress] = []

    def make(seconds: float) -> Progress:
        made.append(Progress(timedelta(seconds=seconds)))
        return made[-1]

    yield make
    for progress in made:
        progress._steps.clear()


Watched = Callable[[float], Progress]


def test_a_progress_that_nobody_has_any_more_is_not_watched() -> None:
    before = set(threading.enumerate())
    progress = Progress(timedelta(seconds=0.1))
    progress.at("the forward")
    [thread] = set(threading.enumerate()) - before
    del progress
    thread.join(timeout=PATIENCE)
    assert not thread.is_alive()


def said_after(capsys: pytest.CaptureFixture[str], words: str) -> str:
    said: list[str] = []

    def heard() -> bool:
        said.append(capsys.readouterr().err)
        return words in "".join(said)

    until(heard, words)
    return "".join(said)


def test_who_waits_too_long_says_for_what_and_once(
    watched: Watched, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    progress = watched(0.5)
    progress.action(Action("B", 4, 1))
    with progress.waiting("its gradient from rank 7"):
        said = said_after(capsys, "rank 7")
        place = "the backward of microbatch 4, chunk 1, waiting for its gradient from rank 7"
        assert said.startswith(f"warning: rank 3 on {HOST} has been in {place} for ")
        time.sleep(0.3)
        assert capsys.readouterr().err == ""
    assert "the backward of microbatch 4, chunk 1 for" in said_after(capsys, "chunk 1 for")


def test_who_goes_on_says_nothing(watched: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    progress = watched(2.0)
    for microbatch in range(40):
        progress.action(Action("F", microbatch, 0))
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_a_host_far_ahead_says_where_its_device_is_stuck(
    watched: Watched, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No host waits for a message there: the line was that of what follows the schedule, on every rank."""
    monkeypatch.setenv("RANK", "2")
    device, progress = Device(monkeypatch), watched(0.5)
    for microbatch in range(3):
        progress.action(Action("F", microbatch, 0))
        with progress.waiting("its activation from rank 1"):
            pass
    progress.at("what follows the schedule")
    action = "the forward of microbatch 1, chunk 0"
    for device.reached, place in (  # of three moments an action: through with the first, at the second's message
        (4, f"{action}, waiting for its activation from rank 1"), (5, action), (10, "what follows the schedule")
    ):  # fmt: skip
        assert said_after(capsys, " s\n").startswith(f"warning: rank 2 on {HOST} has been in {place} for ")


def test_a_device_that_goes_on_says_nothing_and_is_not_remembered(
    watched: Watched, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far the host is ahead; what the device has left behind is forgotten."""
    device, progress = Device(monkeypatch), watched(1.0)
    for microbatch in range(100):
        progress.action(Action("F", microbatch, 0))
    for _ in range(60):
        device.reached += 1
        time.sleep(0.03)
    assert capsys.readouterr().err == ""
    progress.action(Action("B", 0, 0))
    assert len(progress._steps) == 41
