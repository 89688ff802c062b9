"""Runs that take turns: one works at a time, each in every round, and all end with one that fails or a signal."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from examples.demo.take_turns import Turn, turns_of

ROOT = Path(__file__).parents[2]
RUN = """
import json, os, sys, time
folder, iterations, fate = sys.argv[2], int(sys.argv[3]), sys.argv[4]
if os.fork() == 0:  # a rank, in a session of its own, as torchrun's are
    os.setsid()
    for number in range(1, iterations + 1):
        begin = time.monotonic()
        while time.monotonic() < begin + 0.05:
            pass
        if (number, fate) == (40, "fails"):
            os._exit(3)
        line = {"iteration": number, "iterations": iterations, "loss": 1.0, "seconds": time.monotonic() - begin}
        with open(folder + "/metrics.jsonl", "a") as file:
            file.write(json.dumps({**line, "begin": begin}) + chr(10))
    os._exit(0)
code = os.waitstatus_to_exitcode(os.wait()[1])
print("error: the rank has failed", file=sys.stderr)
sys.exit(code)
"""
"""Stands for a launcher: notes iterations of a twentieth of a second."""


def command(folder: Path, name: str, iterations: int, fate: str = "ends") -> str:
    (folder / "run.py").write_text(RUN)
    return shlex.join([sys.executable, str(folder / "run.py"), "--run-dir", str(folder / name), str(iterations), fate])


def started(*commands: str) -> "subprocess.Popen[str]":
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs, perhaps these tests, ignore it
    program = [sys.executable, "examples/demo/take_turns.py"]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(program, cwd=ROOT, text=True, **pipes)  # type: ignore[call-overload]
    process.stdin.write("\n".join(commands) + "\n")
    process.stdin.close()
    process.stdin = None
    return process


def lines_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_run_works_at_a_time_and_each_in_every_round(tmp_path: Path) -> None:
    names = {"one": 130, "other": 90}
    process = started(*(command(tmp_path, name, count) for name, count in names.items()))
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    rounds: list[list[Turn]] = [turns_of(tmp_path / name) for name in names]
    assert [turn.round for turn in rounds[0]][:2] == [turn.round for turn in rounds[1]][:2] == [1, 2]
    for name, turns in zip(names, rounds, strict=True):
        assert len(lines_of(tmp_path / name)) == names[name]
        assert all(len(turn.seconds) >= 2 for turn in turns)
    lines = (line for name in names for line in lines_of(tmp_path / name) if line["seconds"] < 0.5)
    whole = sorted((line["begin"], line["begin"] + line["seconds"]) for line in lines)
    overlapping = [one for one, after in pairwise(whole) if one[1] > after[0]]
    assert len(overlapping) <= sum(len(turns) for turns in rounds)  # of some their turn ended with them


@pytest.mark.parametrize("fate", ["fails", "interrupted"])
def test_all_end_with_one_that_fails_or_a_signal(fate: str, tmp_path: Path) -> None:
    process = started(command(tmp_path, "one", 10**4), command(tmp_path, "other", 10**4, fate))
    while not (tmp_path / "other/metrics.jsonl").exists():
        time.sleep(0.05)
    if fate == "interrupted":
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == {"fails": 2, "interrupted": 128 + signal.SIGINT}[fate]
    if fate == "fails":
        assert f"error: {tmp_path}/other: ended with exit code 3: error: the rank has failed" in errors
    left = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path / "run.py") in (p.info["cmdline"] or ())]
    assert not left, os.getpid()
