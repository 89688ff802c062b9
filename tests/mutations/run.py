"""Plants faults, one at a time in a copy of the repository, and runs the tests that are to see them.

    bash scripts/mutate.sh [NAME...]                   all faults on file, or those named
    bash scripts/mutate.sh --sample 12 --seed 3        some of those whose tests start no ranks
    bash scripts/mutate.sh --random 200 --since HEAD~9 random ones, in modules that have changed since a commit
    bash scripts/mutate.sh --map [TESTS...]            note which tests run which lines, for random ones

A fault dies when one of its tests fails; that test must pass without the fault. Exit code 1 if one survives, fits the
code no more, or has tests that cannot be run.
"""

import argparse
import random
import signal
import sys
import time
from collections.abc import Sequence

import calls
import mutator
from bench import BROKEN, DIED, SLOW, SURVIVED, UNFIT, Bench, Trial
from faults import ROOT, Fault, read_faults

WORKERS = 2
TIME_LIMIT, RANDOM_TIME_LIMIT = 600.0, 60.0
"""Seconds that the tests of a fault have: one on file that hangs them is seen, a random one may have slow tests."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant; none: all")
    parser.add_argument("--sample", type=int, metavar="N", help="plant so many of them, drawn by --seed")
    parser.add_argument("--random", type=int, metavar="N", help="plant so many random faults, drawn by --seed")
    parser.add_argument("--since", metavar="COMMIT", help="random faults: in modules that have changed since")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no trial after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--map", action="store_true", help="run the unit tests, or those given, and note their lines")
    arguments = parser.parse_args()
    if arguments.map:
        sys.exit(calls.write_map(arguments.names))
    if arguments.random is not None:
        faults = mutator.draw(arguments.random, arguments.seed, arguments.since)
    else:
        faults = _chosen(arguments.names, arguments.sample, arguments.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without what it has started
    limit = TIME_LIMIT if arguments.random is None else RANDOM_TIME_LIMIT
    with Bench(min(WORKERS, max(1, len(faults)))) as bench:
        trials = _judge(faults, bench, limit, time.monotonic() + 60 * arguments.minutes)
        _check_clean(trials, bench)
    if arguments.random is None:  # a test that hangs has seen it
        survived = [trial for trial in trials if trial.fate not in (DIED, SLOW)]
    else:
        survived = [trial for trial in trials if trial.fate in (SURVIVED, BROKEN)]
    for trial in survived:
        print(f"{trial.fate}: {described(trial.fault)}")
    slow = sum(trial.fate == SLOW for trial in trials)
    print(f"{len(survived)} survived of {len(trials)}" + f", {slow} {SLOW}" * (slow > 0))
    sys.exit(bool(survived))


def described(fault: Fault) -> str:
    """`file:line  old -> new`, of a fault on file behind its name."""
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    line = text.count("\n", 0, text.find(fault.old) if fault.at is None else fault.at) + 1
    old, new = (" ".join(side.split())[:100] for side in (fault.old, fault.new))
    return f"{fault.name}  " * (fault.at is None) + f"{fault.file}:{line}  {old} -> {new}"


def _chosen(names: Sequence[str], sample: int | None, seed: int) -> list[Fault]:
    known = {fault.name: fault for fault in read_faults()}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"error: no fault {unknown[0]!r} in tests/mutations/faults.jsonl")
    faults = [known[name] for name in names] or list(known.values())
    if sample is None:
        return faults
    faults = [fault for fault in faults if all(test.startswith("tests/unit") for test in fault.tests)]
    return random.Random(seed).sample(faults, min(sample, len(faults)))


def _judge(faults: Sequence[Fault], bench: Bench, limit: float, until: float) -> list[Trial]:
    """Each is printed when it is known."""
    trials = []
    for trial in bench.try_all(faults, limit, until):
        trials.append(trial)
        print(
            f"{len(trials):4}/{len(faults)} {trial.fate:8} {trial.seconds:4.0f} s  {trial.fault.name}  {trial.test}",
            flush=True,
        )
        if trial.fate in (UNFIT, BROKEN):
            print(trial.said[-4000:], file=sys.stderr)
    return trials


def _check_clean(trials: Sequence[Trial], bench: Bench) -> None:
    """Exit if a test that saw a fault fails without any."""
    seen = sorted({trial.test for trial in trials if trial.fate == DIED})
    if not seen:
        return
    print(f"{len(seen)} tests that saw them, without a fault ...", flush=True)
    shares = [seen[first::WORKERS] for first in range(WORKERS)]
    clean = [Fault("none", "setup.py", "", "", tuple(share), at=0) for share in shares if share]
    for trial in bench.try_all(clean, limit=TIME_LIMIT * len(seen)):
        if trial.fate != SURVIVED:
            sys.exit(f"{trial.said[-4000:]}\nerror: {trial.test} fails without a fault too; mend it first")


if __name__ == "__main__":
    main()
