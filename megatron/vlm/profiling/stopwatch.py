"""Timing of runs that all ranks do at the same time: rounds, medians, outliers."""

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
"""(seconds of all runs, without waiting for other ranks; seconds of each run's laps)."""
WARM_UP = 2
OUTLIER = 1.5
"""A run that takes this many times its median was disturbed."""


class Stopwatch:
    """A clock for several runs in interleaved rounds.

    1. A round does every run once. All ranks start each run together, since they share the machine in training too.
       Runs to be compared belong in one call, so that they see the same state of the machine.
    2. Two rounds warm up, then `steps` rounds count.
    3. On the CPU a run's seconds are its median fraction of a round, over steps and ranks, times the median round:
       other load on the machine slows all runs of a round alike. On a GPU they are the plain median.
    4. Outliers are counted in `disturbed`.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._runs: Counter[str] = Counter()
        self._disturbed: Counter[str] = Counter()

    @property
    def disturbed(self) -> dict[str, str]:
        """Outliers among each subject's runs so far, as in "2 of 40"."""
        return {subject: f"{self._disturbed[subject]} of {runs}" for subject, runs in self._runs.items()}

    def measure(self, runs: Mapping[str, Mapping[str, Run]], description: str = "") -> dict[str, dict[str, Seconds]]:
        """Measure the functions runs[subject][name]; return the median seconds of each one's laps; collective.

        A function returns the seconds of its laps (parts). All ranks get the same medians. description: of a progress
        bar.
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
            self._count_disturbed(subject, [lap for name in named for lap in columns[subject, name]])
        return {s: {n: tuple(map(statistics.median, columns[s, n])) for n in named} for s, named in runs.items()}

    def _round(self, runs: Mapping[Key, Run]) -> Round:
        took, found = 0.0, {}
        for key, run in runs.items():
            torch.distributed.barrier()
            began = now()
            found[key] = run()
            took += now() - began
        return took, found

    def _count_disturbed(self, subject: str, laps: Sequence[Seconds]) -> None:
        timed = [lap for lap in laps if min(lap) > 0]  # differences of two runs may be 0 or negative
        self._runs[subject] += sum(map(len, timed))
        self._disturbed[subject] += sum(one > OUTLIER * statistics.median(lap) for lap in timed for one in lap)


def at_usual_pace(rounds: Sequence[Round]) -> dict[Key, list[Seconds]]:
    """Scale each round's seconds to a round of median length; return them by run and lap, as `in_columns` does."""
    usual = statistics.median(took for took, _ in rounds)
    paced = [{key: [s / took * usual for s in laps] for key, laps in found.items()} for took, found in rounds]
    return in_columns(paced)


def in_columns(rounds: Sequence[Mapping[Key, Sequence[float]]]) -> dict[Key, list[Seconds]]:
    """Turn rounds, {run: seconds of its laps} each, into {run: [seconds in every round] of each of its laps}."""
    return {key: list(zip(*(found[key] for found in rounds), strict=True)) for key in rounds[0]}


class Timer:
    """A clock for the consecutive laps of a run: seconds of the device, and of the host that launches them.

    On a GPU the laps are timed as in training, where the host runs ahead of a device that is never idle (and whose
    clock is what its power limit sustains):

    1. `before`, as much work as the laps, is launched first: the device is busy while the laps are launched.
    2. If it is shorter than launching the laps, a sleep kernel is added.
    3. Events between the laps are read when all is done.
    4. The first two calls add no sleep: the first compiles, the second measures the host.

    On the CPU the device is the host, and `host_seconds` are 0.
    """

    LEAD = 1.5
    """Seconds of device work queued before the laps, in multiples of the host's fastest launch."""

    def __init__(self) -> None:
        self._host: list[Seconds] = []
        self._busy = 0.0

    def __call__(self, *laps: Callable[[], object], before: Callable[[], object] | None = None) -> Seconds:
        """Run the functions `laps` one by one; return the device's seconds of each. On a GPU `before` is run first."""
        now()
        if before is not None and platform.HAS_CUDA:
            before()
        if len(self._host) > 1:
            platform.sleep(max(0.0, self.LEAD * min(map(sum, self._host[1:])) - self._busy))
        moments, launched = [Moment()], [time.perf_counter()]
        for lap in laps:
            lap()
            moments.append(Moment())
            launched.append(time.perf_counter())
        now()
        self._host.append(tuple(later - earlier for earlier, later in pairwise(launched)))
        seconds = tuple(earlier.seconds_until(later) for earlier, later in pairwise(moments))
        self._busy = 0.0 if before is None else sum(seconds)
        return seconds

    @property
    def host_seconds(self) -> Seconds:
        """Median seconds that the host takes to launch each lap, after warm-up. Zeros on the CPU."""
        medians = tuple(map(statistics.median, zip(*self._host[WARM_UP:], strict=True)))
        return medians if platform.HAS_CUDA else (0.0,) * len(medians)


def median_seconds(run: Callable[[], object], rounds: int) -> float:
    """Measure a run on this rank alone: the device's median seconds of so many rounds, behind two that warm up."""
    timer = Timer()
    return statistics.median([timer(run, before=run)[0] for _ in range(WARM_UP + rounds)][WARM_UP:])
