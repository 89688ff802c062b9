"""A run that is killed again and again ends as one that is left alone: bit-equal states, every loss, no process left.

python -m tests.endurance.kills FOLDER [--kills 20] [--iterations 200] [--seed 0] [--times 1] [--forks]

FOLDER gets demo data, an undisturbed run and a disturbed one, both with dropout, evaluations, workers that read images
and saves that are written while training goes on. Launcher, torchrun and ranks are killed (the launcher also stopped,
by SIGTERM) at random moments, in steps and in saves; the same command starts the run again.
"""

import argparse
import contextlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from omnibal_ext.run_metrics import evaluations, training_intervals
from tests.programs import ROOT, environment, warm_interpreter

SAVE_INTERVAL = 4
DRAWING = ("--hidden-dropout", 0.1, "--attention-dropout", 0.1, "--eval-interval", 3)
BESIDE = ("--num-workers", 1, "--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")
"""What goes on beside training, in processes that take long to start."""
PIPELINE = ("--method", "isf", "--vit-budget", 40, "--llm-budget", 320, "--micro-batches", 4)
WIDE = ("--vit-budget", 16, "--llm-budget", 56, "--widths", "1,2", "--data-parallel-size", 2, "--micro-batches", 2)
"""How the two ranks' packs are made: as a pipeline runs them, or two data-parallel ranks, some of them together."""
DEADLINE = 600.0
"""Seconds without progress after which the run is taken for hung."""
VICTIMS = ("launcher", "torchrun", "rank 0", "rank 1")
PROGRAMS = {"launcher": "tools/launch.py", "torchrun": "omnibal_ext.launch.torchrun"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=1, help="all of it, at other moments each time")
    parser.add_argument(
        "--forks", action="store_true", help="of a process that has its imports behind it: starts faster"
    )
    arguments = parser.parse_args()
    python = warm_interpreter() if arguments.forks else sys.executable
    prepare(arguments.folder, python)
    for seed in range(arguments.seed, arguments.seed + arguments.times):
        said = survive(arguments.folder, arguments.kills, arguments.iterations, seed, python, (*DRAWING, *BESIDE))
        print(f"seed {seed}: {said}", flush=True)


def prepare(folder: Path, python: str = sys.executable, packing: Sequence[object] = PIPELINE) -> None:
    """Demo data and their packs, to train on and held out, once."""
    if (folder / "held-out-packs").exists():
        return
    demo = folder / "demo"
    commands: list[tuple[str, list[object]]] = [
        ("make_demo_data.py", ["--output-dir", demo, "--samples", 60, "--heldout-samples", 8])
    ]
    for lines, data, packs in (("train", "data", "packs"), ("heldout", "held-out", "held-out-packs")):
        commands += [
            ("preprocess_data.py", ["--input", demo / f"{lines}.jsonl", "--image-root", demo, "--output-dir",
                                    folder / data, "--tokenizer-model", demo / "tokenizer.model", "--chat-template",
                                    "internlm2-chat", "--tile-size", 32, "--tokens-per-tile", 4, "--max-tiles", 32]),
            ("pack_data.py", ["--data", folder / data, *packing, "--output-dir", folder / packs]),
        ]  # fmt: skip
    for name, words in commands:
        command = [python, "-W", "ignore", str(ROOT / "tools" / name), *map(str, words)]
        subprocess.run(command, env=environment(), check=True, stdout=subprocess.DEVNULL)


def survive(
    folder: Path, kills: int, iterations: int, seed: int, python: str = sys.executable,
    flags: Sequence[object] = DRAWING, pipeline: int = 2,
) -> str:  # fmt: skip
    """What became of the disturbed run, in a line; AssertionError where it is not as the other."""
    undisturbed(folder, iterations, python, flags, pipeline)
    shutil.rmtree(folder / "killed", ignore_errors=True)
    moments, done, starts = random.Random(seed), 0, 0
    while True:
        starts += 1
        launcher = start(folder, "killed", iterations, python, *flags, pipeline=pipeline)
        if done < kills and kill_amid(launcher, folder, iterations, moments):
            done += 1
        else:
            assert launcher.wait() == 0, (folder / "killed.log").read_text()[-3000:]
            if reached(folder) >= iterations:
                break
    same(folder, iterations)
    return (
        f"{done} kills, {starts} starts, {iterations} iterations: states and losses are bit-equal, no process is left"
    )


def undisturbed(
    folder: Path, iterations: int, python: str = sys.executable, flags: Sequence[object] = DRAWING, pipeline: int = 2
) -> None:
    if reached(folder, "alone") != iterations:
        shutil.rmtree(folder / "alone", ignore_errors=True)
        assert start(folder, "alone", iterations, python, *flags, pipeline=pipeline).wait() == 0


def start(
    folder: Path, run: str, iterations: int, python: str = sys.executable, *more: object, run_dir: Path | None = None,
    output: int | None = None, pipeline: int = 2,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """The one command of a run, and more of Megatron's flags; its output goes to a log beside the run's folder."""
    saves = ("--save", folder / run / "checkpoints", "--save-interval", SAVE_INTERVAL)
    words = [
        "--preset", "tiny", "--from-scratch", "--data", folder / "data", "--packs", folder / "packs", "--analytic",
        "a100", "--run-dir", run_dir or folder / run, "--nproc-per-node", 2, "--pipeline-model-parallel-size", pipeline,
        "--eval-data", folder / "held-out", "--eval-packs", folder / "held-out-packs", "--", "--lr", "1e-3",
        "--train-iters", iterations, "--log-interval", 1, "--use-distributed-optimizer", *saves, *more,
    ]  # fmt: skip
    command = [python, "-W", "ignore", str(ROOT / "tools/launch.py"), *map(str, words)]
    with (folder / f"{run}.log").open("ab") as log:
        stdout = log if output is None else output
        return subprocess.Popen(command, env=environment(), stdout=stdout, stderr=log, start_new_session=True)


def reached(folder: Path, run: str = "killed") -> int:
    path = folder / run / "metrics.jsonl"
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
    found = {name: process for process, name in at_work(folder / "killed").items()}
    victim = moments.choice(VICTIMS)
    if victim not in found:
        victim = "launcher"
    number = moments.choice((signal.SIGKILL, signal.SIGTERM)) if victim == "launcher" else signal.SIGKILL
    found[victim].send_signal(number)
    print(f"iteration {reached(folder)}: {signal.Signals(number).name} to {victim}", flush=True)
    launcher.wait(120)
    limit = time.monotonic() + 60
    while left := [process for process in tree if is_alive(process)] or [*at_work(folder / "killed")]:
        assert time.monotonic() < limit, f"left: {left}"
        time.sleep(0.05)
    return True


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def at_work(run: Path) -> dict[psutil.Process, str]:
    """The processes whose command names a run's folder, and what each of them is; ranks have children like them."""
    found: dict[psutil.Process, str] = {}
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        if str(run) in command:
            others = len(found) - len(PROGRAMS.keys() & found.values())
            found[process] = next((name for name, words in PROGRAMS.items() if words in command), f"rank {others}")
    return found


def same(folder: Path, iterations: int) -> None:
    """AssertionError unless both runs ended with the same bits."""
    import torch

    from megatron.vlm.checkpoint.folder import Checkpoints

    saves = [Checkpoints(folder / run / "checkpoints").newest() for run in ("alone", "killed")]
    assert [save.iteration for save in saves] == [iterations - iterations % SAVE_INTERVAL] * 2
    alone, killed = (tensors(save.path) for save in saves)
    assert alone.keys() == killed.keys()
    for name in alone:
        assert torch.equal(alone[name], killed[name]), name
    found = [
        {after: (line["loss"], line["source_losses"]) for after, line in evaluations(path).items()}
        for path in (folder / run / "metrics.jsonl" for run in ("alone", "killed"))
    ]
    assert found[0] == found[1]
    assert found[0]
    losses = [
        [line["loss"] for line in training_intervals(folder / run / "metrics.jsonl")] for run in ("alone", "killed")
    ]
    assert len(losses[0]) == iterations
    assert losses[0] == losses[1]


def tensors(save: Path) -> dict[str, Any]:
    """All tensors of a save, whole: weights and the optimizer's state."""
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(save)
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


if __name__ == "__main__":
    main()
