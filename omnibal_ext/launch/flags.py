"""Tables of the launcher's flags: intervals of their numbers, their needs, and which must be before --."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from omnibal_ext import trainer_flags
from omnibal_ext.errors import UserError
from omnibal_ext.flags import Interval, Need, ToolParser
from omnibal_ext.launch.folder import CHECKPOINTS, SAVE_INTERVAL

NUMBERS = (
    *trainer_flags.NUMBERS,
    Interval(
        "[1, 16384]",
        """
        nproc_per_node nnodes tensor_model_parallel_size expert_model_parallel_size pipeline_model_parallel_size
        virtual_pipeline_model_parallel_size micro_batches
        """,
    ),
    Interval("(0, 1e6]", "epochs memory_gib"),
    Interval("[0, 1000]", "measure_top_k"),
    Interval("[1, 1024]", "workers"),
    Interval("[0, inf)", "max_rejects"),
    Interval("[1, inf)", "max_tiles max_pixels max_tokens"),
    Interval("[0, 1e9]", "vit_budget"),
    Interval("[1, 1e9]", "llm_budget"),
    Interval("(0, 1)", "held_out"),
)


def flags_in(words: Sequence[str]) -> set[str]:
    """Return the words of a command line; --flag=value is reduced to --flag."""
    return {word.partition("=")[0] for word in words}


NEEDS = (
    Need(
        "epochs",
        "to be given without --train-iters, which sets the length too",
        lambda given: "--train-iters" not in flags_in(given.megatron),
    ),
    Need(
        """
        chat_template micro_batches max_tiles max_pixels max_tokens shorten vit_budget llm_budget widths held_out
        """,
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
    Need(
        "analytic repack replan method schedule tower recompute virtual_pipeline_model_parallel_size",
        "to be given without --plan: an existing plan is used as it is",
        lambda given: not given.plan,
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
