"""A long run of a tiny model, of whose processes neither memory nor open files grow.

python -m tests.endurance.steady FOLDER [--iterations 3000] [--settled 200]

FOLDER gets demo data and the run: two ranks, a pipeline, dropout, evaluations, image workers, saves written while
training goes on. Memory (resident set) and descriptors of every process are read once a second, their medians compared
between the first and the last third of the iterations after the first 200.
"""

import argparse
import shutil
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median_high

import psutil

from tests.endurance import kills

SHARE, SPARE = 0.03, 8 * 2**20
"""How much more memory counts as none: of what a process has, or in bytes, whichever is more."""
SAVES = ("--save-interval", 50, "--save-retain-interval", 10**6)
Samples = dict[psutil.Process, list[tuple[int, int, int]]]
"""Of each process: iterations, bytes, descriptors."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--settled", type=int, default=200, help="iterations that are not looked at")
    arguments = parser.parse_args()
    kills.prepare(arguments.folder)
    samples = watch(arguments.folder, arguments.iterations)
    rows = growth(samples, arguments.settled, arguments.iterations)
    for name, memory, more, files, more_files in rows:
        print(f"{name:16} {memory:7.1f} -> {more:7.1f} MiB, {files:4d} -> {more_files:4d} descriptors")
    grown = [row for row in rows if grows(*row[1:])]
    print(f"{len(rows)} processes, {arguments.iterations} iterations: {len(grown)} grow")
    sys.exit(bool(grown))


def watch(folder: Path, iterations: int) -> Samples:
    """What the processes of a run have, once a second until it has ended."""
    shutil.rmtree(folder / "steady", ignore_errors=True)
    flags = (*kills.DRAWING, *kills.BESIDE, *SAVES)
    launcher = kills.start(folder, "steady", iterations, sys.executable, *flags)
    samples: Samples = defaultdict(list)
    while launcher.poll() is None:
        iteration = kills.reached(folder, "steady")
        for process in processes(folder / "steady"):
            try:
                with process.oneshot():
                    samples[process].append((iteration, process.memory_info().rss, process.num_fds()))
            except psutil.Error:
                continue
        time.sleep(1.0)
    assert launcher.returncode == 0, (folder / "steady.log").read_text()[-3000:]
    return samples


def processes(run: Path) -> set[psutil.Process]:
    """Launcher, torchrun, ranks and all that these have started."""
    found = {*kills.at_work(run)}
    for process in tuple(found):
        try:
            found |= {*process.children(recursive=True)}
        except psutil.Error:
            continue
    return found


def growth(samples: Samples, settled: int, iterations: int) -> list[tuple[str, float, float, int, int]]:
    """Of each process that lived all along: MiB and descriptors, the median of the first third and of the last.

    What a save takes for a moment, such as the files of its tensors in shared memory, is no growth.
    """
    third, rows = (iterations - settled) / 3, []
    for process, seen in sorted(samples.items(), key=lambda item: item[0].pid):
        early = [sample for sample in seen if settled <= sample[0] <= settled + third]
        late = [sample for sample in seen if sample[0] >= iterations - third]
        if early and late:
            (_, memory, files), (_, more, more_files) = (
                tuple(map(median_high, zip(*part, strict=True))) for part in (early, late)
            )
            rows.append((f"process {process.pid}", memory / 2**20, more / 2**20, files, more_files))
    assert rows, "no process was seen early and late"
    return rows


def grows(memory: float, more: float, files: int, more_files: int) -> bool:
    """Whether a process has more than before."""
    return more_files > files or more > memory + max(SHARE * memory, SPARE / 2**20)


if __name__ == "__main__":
    main()
