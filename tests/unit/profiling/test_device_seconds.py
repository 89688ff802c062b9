"""On a device that is asked and answers later, a profile has the device's seconds, whatever its host takes to ask.

The made-up device has a queue and a clock of its own, behind the host's: what is asked for starts when the host has
asked for it and the device is through with what came before.
"""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from megatron.vlm import platform
from megatron.vlm.profiling import stopwatch
from megatron.vlm.profiling.stopwatch import WARM_UP, Timer


class Device:
    def __init__(self, compiling: float) -> None:
        self.host = self.free = 0.0
        self.compiling = compiling
        """Seconds that the host takes before anything else, once."""

    def kernel(self, asks: float, runs: float) -> None:
        """The host asks for it; the device runs it behind all others."""
        self.host += asks + self.compiling
        self.compiling = 0.0
        self.free = max(self.free, self.host) + runs

    def synchronise(self) -> float:
        self.host = max(self.host, self.free)
        return self.host

    def moment(self) -> "Moment":
        return Moment(max(self.free, self.host))


class Moment:
    def __init__(self, at: float) -> None:
        self.at = at

    def seconds_until(self, later: "Moment") -> float:
        return later.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device(compiling=7.0)
    monkeypatch.setattr(platform, "HAS_CUDA", True)
    monkeypatch.setattr(platform, "sleep", lambda seconds: device.kernel(0.0, seconds))
    monkeypatch.setattr(stopwatch, "Moment", device.moment)
    monkeypatch.setattr(stopwatch, "now", device.synchronise)
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(perf_counter=lambda: device.host))
    return device


KERNELS, FORWARD, BACKWARD = 50, 2.0e-3, 5.0e-3
"""Of a part, and its device's seconds."""


def part(device: Device, seconds: float, asks: float) -> Callable[[], None]:
    def run() -> None:
        for _ in range(KERNELS):
            device.kernel(asks / KERNELS, seconds / KERNELS)

    return run


@pytest.mark.parametrize("times", [0.0, 0.3, 0.9, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("busy", [False, True])
def test_parts_take_what_the_device_takes(device: Device, times: float, busy: bool) -> None:
    """To 1%, and the host's seconds beside them."""
    forward, backward = part(device, FORWARD, times * FORWARD), part(device, BACKWARD, times * FORWARD)

    def both() -> None:
        forward()
        backward()

    timer, taken = Timer(), []
    for _ in range(WARM_UP + 4):
        device.kernel(1e-4, 1e-4)  # what is asked for in between, a step's inputs
        taken.append(timer(forward, backward, before=both if busy else None))
    for seconds in taken[WARM_UP:]:
        assert seconds == pytest.approx((FORWARD, BACKWARD), rel=0.01)
    assert timer.host_seconds == pytest.approx((times * FORWARD, times * FORWARD))
    waited = []
    for each in (forward, backward):  # waiting before and behind every part is what must not be done
        began = device.synchronise()
        each()
        waited.append(device.synchronise() - began)
    if times > 1:
        assert waited[0] > 1.4 * FORWARD


def test_a_part_that_waits_for_its_device_does_not_make_it_sleep_ever_longer(device: Device) -> None:
    def waits() -> None:
        device.kernel(1e-3, 1e-3)
        device.synchronise()

    timer = Timer()
    ends = [(timer(waits), device.host)[1] for _ in range(40)]
    assert ends[-1] - ends[-2] < 0.02


def test_on_the_cpu_nothing_is_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    ticking = SimpleNamespace(perf_counter=lambda: float(next(clock)))
    for module in (platform, stopwatch):
        monkeypatch.setattr(module, "time", ticking)
    timer, called = Timer(), []
    seconds = timer(lambda: called.append(1), lambda: called.append(2), before=lambda: called.append(3))
    assert called == [1, 2]
    assert seconds == pytest.approx((seconds[0], seconds[0]))
    assert timer.host_seconds == ()
