"""Random pairs of flags, in range and out: each run is refused in one line before a rank starts, or trains and obeys.

python -m tests.endurance.flags [--count 500] [--seed 0] [--folder FOLDER]

1. A case is two flags, any of Megatron's parser, of ours and of the launcher, each with a value that it takes or does
   not take (`tests.endurance.flag_values`); most have with them what they need.
2. The checks look at it. What they refuse must be refused in lines, with exit code 2.
3. What they let through trains a few iterations of the tiny model. It must end well, without a traceback, and show that
   every flag was obeyed (`tests.endurance.obeyed`): in iterations, learning rates, losses, saves, evaluations, logs.
"""

import argparse
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess

from tests.endurance import kills, obeyed
from tests.endurance.flag_values import COMPANY, MANY, WORDS, Flag, all_flags
from tests.programs import run_alone, run_tool, warm_interpreter

BASE = {"--lr": "1e-3", "--train-iters": "3", "--log-interval": "1"}
MODEL = "tiny"


@dataclass
class Case:
    """Words of one start: the pair, then company."""

    pair: tuple[str, ...]
    ours: dict[str, str] = field(default_factory=dict)
    """Flags of the launcher; where there are none, ranks are started without it."""
    given: dict[str, str] = field(default_factory=dict)
    """Flags of the trainer; "" stands for a switch."""

    def __str__(self) -> str:
        return " ".join(f"{flag} {value!r}" if value else flag for flag, value in {**self.ours, **self.given}.items())


class Bench:
    """Where cases run: data, packs, and what a run without any of these flags does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kills.prepare(folder, warm_interpreter())
        for name, count in (("small", 2), ("held-out", 1)):
            if not (folder / name).exists():
                budgets = ("--vit-budget", 12, "--llm-budget", 128, "--micro-batches", count)
                done = run_tool("pack_data.py", "--data", folder / "data", *budgets, "--output-dir", folder / name)
                assert done.returncode == 0, done.stderr

    @cache  # noqa: B019 (a bench lives as long as its program)
    def plain(self) -> obeyed.Seen:
        case = Case(())
        return self.seen(case, self.start(case, self.place("plain")), self.folder / "plain")

    def place(self, name: str) -> Path:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / name).mkdir()
        return self.folder / name

    def words(self, case: Case, here: Path) -> list[str]:
        places = {"--data": "DATA", "--packs": "PACKS", "--metrics-file": "HERE/metrics.jsonl"}
        flags = {"--model": MODEL, "--from-scratch": "", "--global-batch-size": "2", **places, **BASE, **case.given}
        return self._filled(flags, here)

    def _filled(self, flags: dict[str, str], here: Path) -> list[str]:
        names = {"HERE": here, "DATA": self.folder / "data", "PACKS": self.folder / "small",
                 "HELD_OUT": self.folder / "held-out"}  # fmt: skip
        words = []
        for flag, value in flags.items():
            name = next((name for name in names if value.startswith(name)), "")
            word = str(names[name]) + value.removeprefix(name) if name else value
            words += [flag, *word.split()] if flag in MANY else [flag, *([word] if word else [])]
        return words

    def launched(self, case: Case, here: Path, *more: str) -> list[str]:
        places = {"--data": "DATA", "--packs": "PACKS", "--run-dir": "HERE", "--analytic": "a100"}
        ours = {"--model": MODEL, "--from-scratch": "", **places, **case.ours}
        if "--plan" in ours or "--profile" in ours:
            del ours["--analytic"]
        return [*self._filled(ours, here), *more, "--", *self._filled({**BASE, **case.given}, here)]

    def check(self, case: Case, here: Path) -> CompletedProcess[str]:
        """What is said of it before any rank starts."""
        if case.ours:
            return run_tool("launch.py", *self.launched(case, here, "--check"))
        job = json.dumps({"endpoint": None, "memory_gib": None, "run_dir": str(here)})
        return run_alone("megatron.vlm.preflight", job, *self.words(case, here))

    def start(self, case: Case, here: Path) -> CompletedProcess[str]:
        if case.ours:
            return run_tool("launch.py", *self.launched(case, here))
        return run_alone("megatron.vlm.pretrain", *self.words(case, here))

    def seen(self, case: Case, done: CompletedProcess[str], here: Path) -> obeyed.Seen:
        given, ours = ({all_flags()[flag].first: value for flag, value in flags.items()}
                       for flags in ({**BASE, **case.given}, case.ours))  # fmt: skip
        return obeyed.Seen(given, ours, done.stdout + done.stderr, here, self.folder / "small")


def draw(seed: int, number: int) -> Case:
    draws = random.Random(f"{seed} {number}")
    flags = all_flags()
    allowed = [name for name, flag in flags.items() if flag.allowed]
    pair = [draws.choice(allowed if draws.random() < 0.6 else list(flags)), draws.choice(allowed)]
    case, wanted = Case(tuple(pair)), {}
    for name in pair:
        wanted[name] = value_of(flags[name], draws)
    for name in pair if draws.random() < 0.85 else ():
        wanted = {**COMPANY.get(flags[name].first, {}), **wanted}
    for name, value in wanted.items():
        (case.ours if flags[name].launcher else case.given)[name] = value
    if case.ours:  # what both take, the launcher is given
        case.ours |= {name: case.given.pop(name) for name in list(case.given) if flags[name].both}
    return case


def value_of(flag: Flag, draws: random.Random) -> str:
    if flag.switch:
        return "" if draws.random() < 0.95 else draws.choice(WORDS[1:])
    if flag.inside and draws.random() < 0.85:
        return draws.choice(flag.inside)
    return draws.choice((*flag.outside, *WORDS))


def judge(bench: Bench, case: Case, number: int) -> str:
    """What became of it, in a word; AssertionError, with all there is to know, where it is not as it must be."""
    here = bench.place(f"case-{number}")
    try:
        checked = bench.check(case, here)
        if checked.returncode == 2:
            return refused(checked)
        assert checked.returncode == 0, "the checks fail"
        if {"--help", "-h"} & {*case.given, *case.ours}:
            return "help"
        done = bench.start(case, here)
        assert "Traceback" not in done.stdout + done.stderr, "a traceback"
        if case.ours and done.returncode == 2 and not (here / "plan.json").exists():
            return refused(done)  # by the planner: as it is asked, there is no plan
        bench.seen(case, done, here).judge(done.returncode, bench.plain())
    except AssertionError as error:
        said = "".join(f"\n{text[-1500:]}" for text in _said(locals()))
        raise AssertionError(f"case {number}: {case}: {error}{said}") from None
    shutil.rmtree(here)
    return "trained"


def _said(found: dict[str, object]) -> list[str]:
    runs = [found.get(name) for name in ("checked", "done")]
    return [run.stdout + run.stderr for run in runs if isinstance(run, CompletedProcess)]


def refused(done: CompletedProcess[str]) -> str:
    """A refusal: lines that say why, and nothing else that a program would say of itself."""
    said = done.stdout + done.stderr
    assert "Traceback" not in said, "a traceback"
    if done.args[0] == "megatron.vlm.preflight":
        findings = json.loads(done.stdout)["findings"]
        lines = [finding["detail"] for finding in findings if finding["state"] == "refused"]
    else:
        lines = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == len(done.stderr.splitlines()), "more than lines of errors"
    assert lines, "no reason"
    assert all(line.isprintable() and 20 < len(line) < 2000 for line in lines), "no line for people"
    return "refused"


def run(folder: Path, count: int, seed: int, keep_going: bool = False) -> Counter[str]:
    bench, found = Bench(folder), Counter[str]()
    for number in range(count):
        case = draw(seed, number)
        try:
            found[judge(bench, case, number)] += 1
        except AssertionError as error:
            if not keep_going:
                raise
            found["wrong"] += 1
            print(f"WRONG {error}\n", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where data and runs lie (default: one of its own)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as own:
        folder = given.folder or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        found = run(folder, given.count, given.seed, keep_going=True)
    print(f"{found['wrong']} wrong of {given.count}: {dict(found)}")
    raise SystemExit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
