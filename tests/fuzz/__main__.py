"""Damaged and made-up files for every reader: each must be read, or refused in one line.

    python -m tests.fuzz [--inputs 100000] [--engine random|atheris] [--seed 0] [--json] [READER...]

Anything else is a finding (`trial.py`): an exception that no document names, a process that a signal ends, five
seconds of computing or a minute of waiting without an answer, or more than 512 MiB beyond what the program had. The
engine draws strings of choices (`mutate.py`); atheris looks for those that reach new lines of ours. Prints a table, in
which "beyond" is the share of the inputs that got past the first check of their file, and ends with 1 if anything was
found.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from omnibal_ext.console import print_json, print_table
from tests.fuzz.readers import all_readers
from tests.fuzz.trial import MOST_CHOICES, Trial, limit_this_process


def main() -> None:
    arguments = _parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="fuzz.") as scratch:
        readers = all_readers(Path(scratch))
        wanted = arguments.readers or list(readers)
        each = -(-arguments.inputs // len(wanted))
        trials = [Trial(name, readers[name], _fresh(Path(scratch) / f"read-{name}")) for name in wanted]
        if arguments.engine == "atheris":
            _atheris(trials[0], each, arguments.seed)
            return
        started = time.perf_counter()
        for trial in trials:
            trial.run(each, arguments.seed)
        report = _as_json if arguments.json else _report
        report(trials, time.perf_counter() - started)
    sys.exit(1 if any(trial.found for trial in trials) else 0)


def _atheris(trial: Trial, inputs: int, seed: int) -> None:
    import atheris

    def run(content: bytes) -> None:
        before = len(trial.found)
        trial(content)
        if len(trial.found) > before:
            raise RuntimeError(list(trial.found)[-1])

    limit_this_process()
    atheris.instrument_all()
    atheris.Setup([sys.argv[0], f"-runs={inputs}", f"-seed={seed + 1}", f"-max_len={MOST_CHOICES}"], run)
    atheris.Fuzz()


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _report(trials: list[Trial], seconds: float) -> None:
    for trial in trials:
        for finding, content in trial.found.items():
            print(f"{trial.name}: {finding}\n    choices {content}")
    fates = ("read", "refused", "undocumented")
    rows = [(trial.name, trial.tried, *(trial.fates[fate] for fate in fates), trial.beyond) for trial in trials]
    sums = [sum(int(row[column]) for row in rows) for column in range(1, 5)]
    table = [(*row[:5], f"{row[5]:.2f}") for row in rows]
    print_table(f"Damaged files, {seconds:.0f} s", ("reader", "inputs", *fates, "beyond"), [*table, ("all", *sums, "")])


def _as_json(trials: list[Trial], _: float) -> None:
    found = {f"{trial.name}: {finding}": content for trial in trials for finding, content in trial.found.items()}
    print_json({"found": found, "beyond": {trial.name: trial.beyond for trial in trials}})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*", metavar="READER", help="which; none: all")
    parser.add_argument("--inputs", type=int, default=100_000, help="of all readers together")
    parser.add_argument("--engine", choices=("random", "atheris"), default="random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="findings with their choices, and the shares")
    return parser


if __name__ == "__main__":
    main()
