"""A run that is killed again and again ends as one that is left alone: bit-equal states, every loss, no process left.

python -m tests.endurance.kills FOLDER [--kills 20] [--iterations 200] [--ranks 2] [--hears] [--seed 0] [--forks]

FOLDER gets demo data, an undisturbed run and a disturbed one, both with a pipeline, dropout, evaluations, distributed
optimizer, workers that read images, and saves that are written while training goes on. Launcher, torchrun, ranks, their
workers and all at once are killed (the launcher also stopped, by SIGTERM) at random moments, in steps and in saves; the
same command starts the run again. With --hears the model sees and hears, and what prepares its data, packs, profile and
plan is killed too.
"""

import argparse
import contextlib
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from omnibal_ext.run_metrics import evaluations, training_intervals
from tests.endurance import hearing
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
PROGRAMS = {"launcher": "tools/launch.py", "torchrun": "omnibal_ext.launch.torchrun"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4), help="in pipelines of two")
    parser.add_argument("--hears", action="store_true", help="a model that sees and hears, from conversations on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=1, help="all of it, at other moments each time")
    parser.add_argument(
        "--forks", action="store_true", help="of a process that has its imports behind it: starts faster"
    )
    arguments = parser.parse_args()
    python = warm_interpreter() if arguments.forks else sys.executable
    if arguments.hears:
        print(hearing.prepare(arguments.folder, python, arguments.seed), flush=True)
    else:
        prepare(arguments.folder, python)
    for seed in range(arguments.seed, arguments.seed + arguments.times):
        run = arguments.folder, arguments.kills, arguments.iterations, seed, python, (*DRAWING, *BESIDE)
        print(f"seed {seed}: {survive(*run, ranks=arguments.ranks)}", flush=True)


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
    flags: Sequence[object] = DRAWING, pipeline: int = 2, ranks: int = 2,
) -> str:  # fmt: skip
    """What became of the disturbed run, in a line; AssertionError where it is not as the other."""
    undisturbed(folder, iterations, python, flags, pipeline, ranks)
    shutil.rmtree(folder / "killed", ignore_errors=True)
    moments, done, starts, launcher, spared = random.Random(seed), 0, 0, None, False
    while True:
        if launcher is None or launcher.poll() is not None:
            starts, spared = starts + 1, False
            launcher = start(folder, "killed", iterations, python, *flags, pipeline=pipeline, ranks=ranks)
        if done < kills and (victim := kill_amid(launcher, folder, iterations, moments, ranks)):
            done, spared = done + 1, victim == "worker"
        else:  # without a worker the last save may have failed, which is no end without an error
            assert launcher.wait() == 0 or (spared and launcher.returncode == 1), last_words(folder)
            if launcher.returncode == 0 and reached(folder) >= iterations:
                break
    same(folder, iterations)
    return (
        f"{done} kills, {starts} starts, {iterations} iterations: states and losses are bit-equal, no process is left"
    )


def last_words(folder: Path) -> str:
    return (folder / "killed.log").read_text()[-3000:]


def undisturbed(
    folder: Path, iterations: int, python: str = sys.executable, flags: Sequence[object] = DRAWING, pipeline: int = 2,
    ranks: int = 2,
) -> None:  # fmt: skip
    if reached(folder, "alone") != iterations:
        shutil.rmtree(folder / "alone", ignore_errors=True)
        assert start(folder, "alone", iterations, python, *flags, pipeline=pipeline, ranks=ranks).wait() == 0


def start(
    folder: Path, run: str, iterations: int, python: str = sys.executable, *more: object, run_dir: Path | None = None,
    output: int | None = None, pipeline: int = 2, ranks: int = 2,
) -> subprocess.Popen[bytes]:  # fmt: skip
    """The one command of a run, and more of Megatron's flags; its output goes to a log beside the run's folder."""
    saves = ("--save", folder / run / "checkpoints", "--save-interval", SAVE_INTERVAL)
    words = [
        *inputs(folder), "--from-scratch", "--analytic", "a100", "--run-dir", run_dir or folder / run,
        "--nproc-per-node", ranks, "--pipeline-model-parallel-size", pipeline, "--", "--lr", "1e-3",
        "--train-iters", iterations, "--log-interval", 1, "--use-distributed-optimizer", *saves, *more,
    ]  # fmt: skip
    command = [python, "-W", "ignore", str(ROOT / "tools/launch.py"), *map(str, words)]
    with (folder / f"{run}.log").open("ab") as log:
        stdout = log if output is None else output
        return subprocess.Popen(command, env=environment(), stdout=stdout, stderr=log, start_new_session=True)


def inputs(folder: Path) -> list[object]:
    """Model, data and packs: those that `hearing.prepare` has made, or else those of `prepare`."""
    if hearing.is_prepared(folder):
        return hearing.inputs(folder)
    made = {"--data": "data", "--packs": "packs", "--eval-data": "held-out", "--eval-packs": "held-out-packs"}
    return ["--preset", "tiny", *(word for flag, name in made.items() for word in (flag, folder / name))]


def reached(folder: Path, run: str = "killed") -> int:
    path = folder / run / "metrics.jsonl"
    return training_intervals(path)[-1]["iteration"] if path.exists() and path.stat().st_size else 0


def kill_amid(
    launcher: subprocess.Popen[bytes], folder: Path, iterations: int, moments: random.Random, ranks: int
) -> str:
    """Let it get a few iterations further, and end one of its processes, or all; which, "" if it has ended before."""
    goal = min(iterations - 1, reached(folder) + moments.randint(1, 2 * SAVE_INTERVAL))
    until(lambda: reached(folder) >= goal or launcher.poll() is not None)
    if moments.random() < 0.5:
        last = min(iterations - 1, goal + SAVE_INTERVAL)
        until(lambda: is_saving(folder) or reached(folder) >= last or launcher.poll() is not None)
    else:
        time.sleep(moments.uniform(0.0, 0.5))
    if launcher.poll() is not None:
        return ""
    tree = psutil.Process(launcher.pid).children(recursive=True)
    named = {process: name for process, name in at_work(folder / "killed").items() if name in victims(ranks)}
    victim = moments.choice([*victims(ranks), "worker", "all"])
    killed = [process for process, name in named.items() if victim in (name, "all")]
    if victim == "worker":
        killed = [moments.choice(workers)] if (workers := children_of(named)) else []
    if not killed:
        victim, killed = "launcher", [process for process, name in named.items() if name == "launcher"]
    number = moments.choice((signal.SIGKILL, signal.SIGTERM)) if victim == "launcher" else signal.SIGKILL
    said = f"iteration {reached(folder)}{', in a save' * is_saving(folder)}: {signal.Signals(number).name} to {victim}"
    for process in killed:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    print(said, flush=True)
    if victim == "worker":  # one that writes saves is started again: the run may go on
        further = reached(folder) + SAVE_INTERVAL
        until(lambda: launcher.poll() is not None or min(further, iterations) <= reached(folder))
        if launcher.poll() is None:
            return victim
    launcher.wait(120)
    limit = time.monotonic() + 60
    while left := [process for process in tree if is_alive(process)] or [*at_work(folder / "killed")]:
        assert time.monotonic() < limit, f"left: {left}"
        time.sleep(0.05)
    return victim


def until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + DEADLINE
    while not is_so():
        assert time.monotonic() < limit, "the run hangs"
        time.sleep(0.05)


def victims(ranks: int) -> list[str]:
    return [*PROGRAMS, *(f"rank {rank}" for rank in range(ranks))]


def is_saving(folder: Path) -> bool:
    """Whether a save is not sealed yet."""
    saves = (folder / "killed/checkpoints").glob("iter_*")
    return any(not (save / "integrity.json").exists() for save in saves)


def children_of(named: Mapping[psutil.Process, str]) -> list[psutil.Process]:
    """The processes beside training: they read images, write saves, hand on what was written."""
    found: set[psutil.Process] = set()
    for rank in (process for process, name in named.items() if name not in PROGRAMS):
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {*rank.children(recursive=True)}
    return sorted(found - named.keys(), key=lambda process: process.pid)


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
