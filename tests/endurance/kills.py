"""A run that is killed again and again ends as one that is left alone: bit-equal weights, every loss, no process left.

python -m tests.endurance.kills FOLDER [--kills 20] [--iterations 200] [--seed 0]

FOLDER gets demo data, an undisturbed run and a disturbed one. Launcher, torchrun and ranks are killed (the launcher
also stopped, by SIGTERM) at random moments, in steps and in saves; the same command starts the run again.
"""

import argparse
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from omnibal_ext.run_metrics import training_intervals
from tests.programs import ROOT, environment

SAVE_INTERVAL = 4
DEADLINE = 600.0
"""Seconds without progress after which the run is taken for hung."""
VICTIMS = ("launcher", "torchrun", "rank 0", "rank 1")


def main() -> None:
    """Both runs, compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    prepare(arguments.folder)
    print(survive(arguments.folder, arguments.kills, arguments.iterations, arguments.seed))


def prepare(folder: Path) -> None:
    """Demo data and its packs, once."""
    if (folder / "packs").exists():
        return
    demo, data = folder / "demo", folder / "data"
    tool("make_demo_data.py", "--output-dir", demo, "--samples", 60, "--heldout-samples", 1)
    tool("preprocess_data.py", "--input", demo / "train.jsonl", "--image-root", demo, "--output-dir", data,
         "--tokenizer-model", demo / "tokenizer.model", "--chat-template", "internlm2-chat", "--tile-size", 32,
         "--tokens-per-tile", 4, "--max-tiles", 32)  # fmt: skip
    tool("pack_data.py", "--data", data, "--method", "isf", "--vit-budget", 40, "--llm-budget", 320,
         "--micro-batches", 4, "--output-dir", folder / "packs")  # fmt: skip


def tool(name: str, *arguments: object) -> None:
    """Run one of our tools."""
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / name), *map(str, arguments)]
    subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)


def survive(folder: Path, kills: int, iterations: int, seed: int) -> str:
    """What became of the disturbed run, in a line; AssertionError where it is not as the other."""
    for run in ("alone", "killed"):
        shutil.rmtree(folder / run, ignore_errors=True)
    assert start(folder, "alone", iterations).wait() == 0
    moments, done, starts = random.Random(seed), 0, 0
    while True:
        starts += 1
        launcher = start(folder, "killed", iterations)
        if done < kills and kill_amid(launcher, folder, iterations, moments):
            done += 1
        else:
            assert launcher.wait() == 0, (folder / "killed.log").read_text()[-3000:]
            if reached(folder) >= iterations:
                break
    same(folder, iterations)
    return (
        f"{done} kills, {starts} starts, {iterations} iterations: weights and losses are bit-equal, no process is left"
    )


def start(folder: Path, run: str, iterations: int) -> subprocess.Popen[bytes]:
    """The one command of a run."""
    words = ["--preset", "tiny", "--from-scratch", "--data", folder / "data", "--packs", folder / "packs", "--analytic",
             "a100", "--run-dir", folder / run, "--nproc-per-node", 2, "--pipeline-model-parallel-size", 2, "--",
             "--lr", "1e-3", "--train-iters", iterations, "--log-interval", 1, "--save", folder / run / "checkpoints",
             "--save-interval", SAVE_INTERVAL, "--use-distributed-optimizer"]  # fmt: skip
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools/launch.py"), *map(str, words)]
    with (folder / f"{run}.log").open("ab") as log:
        return subprocess.Popen(command, env=environment(), stdout=log, stderr=log, start_new_session=True)


def reached(folder: Path) -> int:
    """The last iteration that the disturbed run has told of."""
    path = folder / "killed/metrics.jsonl"
    return training_intervals(path)[-1]["iteration"] if path.exists() and path.stat().st_size else 0


def kill_amid(launcher: subprocess.Popen[bytes], folder: Path, iterations: int, moments: random.Random) -> bool:
    """Let it get a few iterations further, and end one of its processes; whether that was before its own end."""
    goal = min(iterations - 1, reached(folder) + moments.randint(1, 2 * SAVE_INTERVAL))
    limit = time.monotonic() + DEADLINE
    while reached(folder) < goal and launcher.poll() is None:
        assert time.monotonic() < limit, "the run hangs"
        time.sleep(0.05)
    time.sleep(moments.uniform(0.0, 0.5))  # in a step, or in the save that follows
    if launcher.poll() is not None:
        return False
    tree = psutil.Process(launcher.pid).children(recursive=True)
    ranks = [process for process in tree if "megatron.vlm.pretrain" in " ".join(process.cmdline()[-40:])]
    victim = moments.choice(VICTIMS)
    number = moments.choice((signal.SIGKILL, signal.SIGTERM)) if victim == "launcher" else signal.SIGKILL
    named = {"launcher": psutil.Process(launcher.pid), "torchrun": tree[0] if tree else None,
             "rank 0": ranks[-2] if len(ranks) > 1 else None, "rank 1": ranks[-1] if ranks else None}  # fmt: skip
    process = named[victim] or psutil.Process(launcher.pid)
    process.send_signal(number)
    print(f"iteration {reached(folder)}: {signal.Signals(number).name} to {victim}", flush=True)
    launcher.wait(120)
    limit = time.monotonic() + 60
    while left := [process for process in tree if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < limit, f"left: {left}"
        time.sleep(0.05)
    return True


def same(folder: Path, iterations: int) -> None:
    """AssertionError unless both runs ended with the same bits."""
    import torch

    from megatron.vlm.hf.checkpoint import OurCheckpoint

    alone, killed = (OurCheckpoint(folder / run / "checkpoints") for run in ("alone", "killed"))
    assert alone.save.iteration == killed.save.iteration
    assert alone.weights.keys() == killed.weights.keys()
    for name in alone.weights:
        assert torch.equal(alone.tensor(name), killed.tensor(name)), name
    losses = [
        [line["loss"] for line in training_intervals(folder / run / "metrics.jsonl")] for run in ("alone", "killed")
    ]
    assert len(losses[0]) == iterations
    assert losses[0] == losses[1]


if __name__ == "__main__":
    main()
