"""Seconds of what all ranks do at once: rounds, medians, outliers."""

import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch

from megatron.vlm import platform

WARM_UP = 2
OUTLIER = 1.5
"""A run that takes this many times its median was disturbed."""


class Stopwatch:
    """Times several runs side by side.

    1. A round does every run once; all ranks start each together, so they share the machine as they do in training.
       Runs that are compared see the same weather.
    2. Two rounds warm up, then `steps` count.
    3. The figure is the median over steps and ranks. How many runs were disturbed is counted, for people to see.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._runs = self._disturbed = 0

    def measure(self, runs: Mapping[str, Callable[[], tuple[float, ...]]]) -> dict[str, tuple[float, ...]]:
        """Each run returns the seconds of its parts; here are their medians, by the run's name. On all ranks alike."""
        rounds = [{name: self._together(run) for name, run in runs.items()} for _ in range(WARM_UP + self.steps)]
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, rounds[WARM_UP:])
        seen = [one for ranks in everyone for one in ranks]
        return {name: tuple(map(self._median, zip(*(one[name] for one in seen), strict=True))) for name in runs}

    def told(self) -> str:
        """How many runs were disturbed since this was last asked, as in "2 of 40"."""
        text = f"{self._disturbed} of {self._runs}"
        self._runs = self._disturbed = 0
        return text

    def _together(self, run: Callable[[], tuple[float, ...]]) -> tuple[float, ...]:
        torch.distributed.barrier()
        return run()

    def _median(self, seconds: tuple[float, ...]) -> float:
        median = statistics.median(seconds)
        if min(seconds) > 0:  # a difference of two runs may be anything
            self._runs += len(seconds)
            self._disturbed += sum(one > OUTLIER * median for one in seconds)
        return median


def now() -> float:
    """Seconds of a clock, once the device has done what it was asked."""
    platform.synchronize()
    return time.perf_counter()


def timed(*parts: Callable[[], object]) -> tuple[float, ...]:
    """Seconds that each part takes, run one after the other."""
    ends = [now()]
    for part in parts:
        part()
        ends.append(now())
    return tuple(end - start for start, end in pairwise(ends))
