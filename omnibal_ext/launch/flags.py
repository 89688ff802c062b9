"""The launcher's flags: intervals of numbers, needs, which must be before --; command lines of the ranks."""

import argparse
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from omnibal_ext import trainer_flags
from omnibal_ext.errors import UserError
from omnibal_ext.flags import FURTHER_BUDGETS, Interval, Need, ToolParser, flag_name
from omnibal_ext.launch.folder import CHECKPOINTS, PLAN, SAVE_INTERVAL, TENSORBOARD
from omnibal_ext.launch.processes import python
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex

NUMBERS = (
    *trainer_flags.NUMBERS,
    Interval("[1, 16384]", "nproc_per_node nnodes micro_batches"),
    Interval("(0, 1e6]", "epochs memory_gib"),
    Interval("[0, 1000]", "measure_top_k"),
)


def flags_in(words: Sequence[str]) -> set[str]:
    """Return the words of a command line; --flag=value is reduced to --flag."""
    return {word.partition("=")[0] for word in words}


def is_own_plan(given: Namespace) -> bool:
    """Return whether --plan names RUN/plan.json, as train.sbatch does once its first node has made it."""
    return bool(given.plan and given.run_dir) and Path(given.plan).resolve() == (Path(given.run_dir) / PLAN).resolve()


USED_AS_IT_IS = "to be given without --plan: an existing plan is used as it is"
NEEDS = (
    Need(
        "epochs",
        "to be given without --train-iters, which sets the length too",
        lambda given: "--train-iters" not in flags_in(given.megatron),
    ),
    Need(
        "chat_template micro_batches max_tiles max_pixels max_tokens shorten vit_budget llm_budget "
        f"{FURTHER_BUDGETS} widths held_out",
        "--input: existing datasets and packs are used as they are",
        lambda given: not (given.data or given.packs),
    ),
    Need(
        "widths",
        "--llm-budget TOKENS, for one rank: the default holds the longest sample on one rank",
        lambda given: given.llm_budget,
    ),
    Need(
        "held_out",
        "to be given without --eval-data, which is the held-out data",
        lambda given: not (given.eval_data or given.eval_packs),
    ),
    Need(
        "save_hf",
        "to be given without --no-save: the weights are written next to the saves",
        lambda given: not given.no_save,
    ),
    Need("no_save", "to be given without --save", lambda given: "--save" not in flags_in(given.megatron)),
    Need("repack replan", USED_AS_IT_IS, lambda given: not given.plan),
    Need(
        "analytic method schedule tower recompute virtual_pipeline_model_parallel_size",
        USED_AS_IT_IS,
        lambda given: not given.plan or is_own_plan(given),
    ),
    Need(
        "replan",
        "to be given without --repack: a run keeps its packs; give them by --packs RUN/packs",
        lambda given: not given.repack,
    ),
    Need("analytic", "to be given without --profile, which has the costs", lambda given: not given.profile),
    Need("nnodes", "--rdzv-endpoint HOST:PORT of the first node", lambda given: given.rdzv_endpoint),
)


def refuse_misplaced(parser: ToolParser, words: Sequence[str]) -> None:
    """Raise UserError for flags of the launcher among the words after --, which go to Megatron."""
    launcher = {option for action in parser._actions for option in action.option_strings} - parser.forwarded
    if misplaced := [flag for word in words if (flag := word.partition("=")[0]) in launcher]:
        raise UserError(
            *(f"{flag} stands behind --, where Megatron's flags are; give it before, so that plan, packs and "
              "checks use it too" for flag in misplaced)
        )  # fmt: skip


def save_in_run(arguments: Namespace) -> None:
    """Add --save RUN/checkpoints and --save-interval to Megatron's flags, unless they or --no-save are given."""
    given = flags_in(arguments.megatron)
    if arguments.no_save or "--save" in given:
        return
    arguments.megatron += ["--save", str(Path(arguments.run_dir) / CHECKPOINTS)]
    if "--save-interval" not in given:
        arguments.megatron += ["--save-interval", str(SAVE_INTERVAL)]


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
    read = ("data", "packs", "eval_data", "eval_packs")
    sizes = (f"{size}_model_parallel_size" for size in ("tensor", "expert", "pipeline"))
    flags = {
        "--model": arguments.model,
        "--from": arguments.first_weights,
        "--plan": plan,
        **{flag_name(name): getattr(arguments, name) for name in (*read, *sizes)},
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
