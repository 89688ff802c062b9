"""A model that sees and hears; the command that makes its data, packs, profile and plan is killed again and again."""

import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

from omnibal_ext.plan import Plan
from tests.programs import ROOT, environment

KILLS = 4
LONGEST = 60.0
"""Seconds in which a kill comes."""


def is_prepared(folder: Path) -> bool:
    """Whether `prepare` has been there."""
    return (folder / "prepared/plan.json").exists()


def inputs(folder: Path) -> list[object]:
    """Flags of a run on what was prepared."""
    made = folder / "prepared"
    data, packs, held_out = made / "data", made / "packs-by-size", made / "packs-held-out"
    run = ["--data", data, "--packs", packs, "--eval-data", data, "--eval-packs", held_out]
    return ["--model", folder / "model", *run]


def prepare(folder: Path, python: str, seed: int) -> str:
    """Prepare twice, once undisturbed; what became of it, in a line. AssertionError unless data and packs are equal."""
    if is_prepared(folder):
        return "prepared before"
    from tests.system.families import build

    made = folder / "made"
    words = ["--output-dir", made, "--samples", 24, "--heldout-samples", 2]
    command = [python, "-W", "ignore", str(ROOT / "tools/make_demo_data.py"), *map(str, words)]
    subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)
    build("qwen2.5-omni", made, folder)
    sounds = (folder / "sounds.jsonl").read_text()
    (folder / "sounds.jsonl").write_text("\n".join([sounds] * 4))
    began = time.monotonic()
    assert start(folder, "undisturbed", python).wait() == 0
    longest, moments, done = min(LONGEST, time.monotonic() - began), random.Random(seed), 0
    while (run := start(folder, "killed-prepared", python)).poll() is None:
        seconds = moments.uniform(0.0, longest)
        try:
            assert run.wait(seconds if done < KILLS else None) == 0, (folder / "prepared.log").read_text()[-3000:]
            break
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGKILL)
            run.wait()
            done += 1
            print(f"after {seconds:.1f} s of preparing: SIGKILL", flush=True)
    for path in sorted((folder / "undisturbed").rglob("*")):
        other = folder / "killed-prepared" / path.relative_to(folder / "undisturbed")
        if path.suffix in (".npy", ".npz") and path.is_file():
            assert path.read_bytes() == other.read_bytes(), other
    Plan.load(folder / "killed-prepared/plan.json")
    shutil.move(folder / "killed-prepared", folder / "prepared")
    return f"prepared with {done} kills: data and packs are bit-equal"


def start(folder: Path, run: str, python: str) -> subprocess.Popen[bytes]:
    """From conversations to a plan, by a measured profile."""
    words = [
        "--model", folder / "model", "--from-scratch", "--run-dir", folder / run, "--input",
        folder / "demo/train.jsonl", folder / "sounds.jsonl", "--micro-batches", 4, "--held-out", 0.2,
        "--nproc-per-node", 2, "--pipeline-model-parallel-size", 2, "--dry-run",
    ]  # fmt: skip
    command = [python, "-W", "ignore", str(ROOT / "tools/launch.py"), *map(str, words)]
    with (folder / "prepared.log").open("ab") as log:
        return subprocess.Popen(command, env=environment(), stdout=log, stderr=log, start_new_session=True)
