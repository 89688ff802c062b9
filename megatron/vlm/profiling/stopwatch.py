"""Seconds of what all ranks do at once: rounds, medians, outliers."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from megatron.vlm import platform
from megatron.vlm.platform import Moment, now
from omnibal_ext.console import track

Seconds = tuple[float, ...]
Run = Callable[[], Seconds]
Key = tuple[str, str]
"""Subject and name of a run."""
Round = tuple[float, dict[Key, Seconds]]
"""Seconds of all runs together, without waiting for other ranks, and of every run's parts."""
WARM_UP = 2
OUTLIER = 1.5
"""A run that takes this many times its median was disturbed."""


class Stopwatch:
    """Times several runs side by side.

    1. A round does every run once; all ranks start each together, so they share the machine as they do in training.
       Runs that are compared belong in one call: they then see the same weather.
    2. Two rounds warm up, then `steps` count.
    3. A run's figure is its median share of a round, over steps and ranks, times the median round: what changes the
       pace of a whole machine for a while, as neighbours on a shared one do, changes no share. How many runs were
       disturbed is counted, for people to see. A GPU has its pace to itself: there it is the median as it is.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._runs: Counter[str] = Counter()
        self._disturbed: Counter[str] = Counter()

    @property
    def disturbed(self) -> dict[str, str]:
        """Of each subject's runs so far, as in "2 of 40"."""
        return {subject: f"{self._disturbed[subject]} of {runs}" for subject, runs in self._runs.items()}

    def measure(self, runs: Mapping[str, Mapping[str, Run]], description: str = "") -> dict[str, dict[str, Seconds]]:
        """Each run returns the seconds of its parts; here are their medians, by subject and name, on all ranks alike.

        With a description, rank 0 shows a progress bar.
        """
        rounds: Iterable[int] = range(WARM_UP + self.steps)
        if description and torch.distributed.get_rank() == 0:
            rounds = track(rounds, description, WARM_UP + self.steps)
        flat = {(subject, name): run for subject, named in runs.items() for name, run in named.items()}
        mine = [self._round(flat) for _ in rounds]
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, mine[WARM_UP:])
        timed = [one for ranks in everyone for one in ranks]
        columns = in_columns([found for _, found in timed]) if platform.HAS_CUDA else at_usual_pace(timed)
        for subject, named in runs.items():
            self._count_disturbed(subject, [part for name in named for part in columns[subject, name]])
        return {s: {n: tuple(map(statistics.median, columns[s, n])) for n in named} for s, named in runs.items()}

    def _round(self, runs: Mapping[Key, Run]) -> Round:
        took, found = 0.0, {}
        for key, run in runs.items():
            torch.distributed.barrier()
            began = now()
            found[key] = run()
            took += now() - began
        return took, found

    def _count_disturbed(self, subject: str, parts: Sequence[Seconds]) -> None:
        timed_parts = [part for part in parts if min(part) > 0]  # a difference of two runs may be anything
        self._runs[subject] += sum(map(len, timed_parts))
        self._disturbed[subject] += sum(one > OUTLIER * statistics.median(part) for part in timed_parts for one in part)


def at_usual_pace(rounds: Sequence[Round]) -> dict[Key, list[Seconds]]:
    """For every part of every run its seconds in all rounds, had each round taken as long as the median one."""
    usual = statistics.median(took for took, _ in rounds)
    paced = [{key: [s / took * usual for s in parts] for key, parts in found.items()} for took, found in rounds]
    return in_columns(paced)


def in_columns(rounds: Sequence[Mapping[Key, Sequence[float]]]) -> dict[Key, list[Seconds]]:
    """For every part of every run its seconds in all rounds."""
    return {key: list(zip(*(found[key] for found in rounds), strict=True)) for key in rounds[0]}


class Timer:
    """Times the parts of a run, which follow each other: seconds of this rank's device, and of its host beside them.

    On a GPU the host only launches kernels. The parts are timed as in training, where the host runs ahead of a device
    that is never idle, and whose clock is the one that its power limit sustains:

    1. `before` is launched first, as much work as the parts: the device is busy while the parts are launched.
    2. Where that is less than launching takes, the device sleeps too.
    3. Between parts its stream has events, which are read when all is done.
    4. The first two calls do not sleep: one compiles, the other tells how long the host takes.

    On the CPU both are one, and the host's seconds are 0.
    """

    LEAD = 1.5
    """The device has work for so many times as long as the host took at its fastest."""

    def __init__(self) -> None:
        self._host: list[Seconds] = []
        self._busy = 0.0

    def __call__(self, *parts: Callable[[], object], before: Callable[[], object] | None = None) -> Seconds:
        """Run the parts; seconds that the device spends on each."""
        now()
        if before is not None and platform.HAS_CUDA:
            before()
        if len(self._host) > 1:
            platform.sleep(max(0.0, self.LEAD * min(map(sum, self._host[1:])) - self._busy))
        moments, asked = [Moment()], [time.perf_counter()]
        for part in parts:
            part()
            moments.append(Moment())
            asked.append(time.perf_counter())
        now()
        self._host.append(tuple(later - earlier for earlier, later in pairwise(asked)))
        seconds = tuple(earlier.seconds_until(later) for earlier, later in pairwise(moments))
        self._busy = 0.0 if before is None else sum(seconds)
        return seconds

    @property
    def host_seconds(self) -> Seconds:
        """What the host takes to ask for each part: medians of the calls that do not warm up. Zeros on the CPU."""
        medians = tuple(map(statistics.median, zip(*self._host[WARM_UP:], strict=True)))
        return medians if platform.HAS_CUDA else (0.0,) * len(medians)
