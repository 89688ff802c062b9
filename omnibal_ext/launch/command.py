"""Command lines that start the ranks of a run."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from omnibal_ext.launch.folder import TENSORBOARD
from omnibal_ext.launch.processes import python
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex

TIMELINES = 10
"""Iterations whose timelines a run records for its report."""
UNKNOWN_ITERATIONS = 10**6
"""Value of --train-iters in checks of a run with --epochs whose packs are not made yet."""


def ranks_command(words: Sequence[str]) -> list[str]:
    """The command that starts the ranks of `torchrun_words` on this machine."""
    return python("-m", "omnibal_ext.launch.torchrun", *words)


def torchrun_words(arguments: argparse.Namespace, plan: Path, index: PackedIndex, metrics: Path) -> list[str]:
    """Return the arguments of torchrun."""
    if arguments.nnodes > 1:
        rendezvous = [f"--nnodes={arguments.nnodes}", f"--rdzv-id={arguments.rdzv_id}", "--rdzv-backend=c10d"]
        rendezvous.append(f"--rdzv-endpoint={arguments.rdzv_endpoint}")
    else:
        rendezvous = ["--standalone"]
    words = [*rendezvous, f"--nproc-per-node={arguments.nproc_per_node}", "-m", "megatron.vlm.pretrain"]
    return [*words, *trainer_words(arguments, plan, metrics, index)]


def trainer_words(arguments: argparse.Namespace, plan: Path, metrics: Path, packs: PackedIndex | int) -> list[str]:
    """Return the arguments of `megatron.vlm.pretrain`; `packs`: the index or, before it exists, packs per iteration."""
    flags = {
        "--model": arguments.model,
        "--from": arguments.first_weights,
        "--plan": plan,
        "--data": arguments.data,
        "--packs": arguments.packs,
        "--eval-data": arguments.eval_data,
        "--eval-packs": arguments.eval_packs,
        "--tensor-model-parallel-size": arguments.tensor_model_parallel_size,
        "--expert-model-parallel-size": arguments.expert_model_parallel_size,
        "--pipeline-model-parallel-size": arguments.pipeline_model_parallel_size,
        "--global-batch-size": packs if isinstance(packs, int) else packs.global_batch,
        "--metrics-file": metrics,
        "--timelines": TIMELINES,
        "--tensorboard-dir": Path(arguments.run_dir) / TENSORBOARD,
        "--train-iters": _iterations(arguments.epochs, packs),
    }
    words = [str(word) for flag, value in flags.items() if value is not None for word in (flag, value)]
    names = ("from-scratch", "fresh", "save-hf")
    switches = [f"--{name}" for name in names if getattr(arguments, name.replace("-", "_"))]
    return [*words, *switches, *arguments.megatron]


def _iterations(epochs: float | None, packs: PackedIndex | int) -> int | None:
    """Return the iterations of so many epochs; None without --epochs."""
    if not epochs:
        return None
    if isinstance(packs, int):
        return UNKNOWN_ITERATIONS
    return PackStream(packs, packs.global_batch, 1).first_iteration(epochs)
