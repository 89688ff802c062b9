"""The command line of omnibal profile; the launcher takes its settings from here too. Reading it imports no torch."""

import argparse

from omnibal_ext import adapters
from omnibal_ext.architectures.presets import MODEL_FLAGS
from omnibal_ext.costs.analytic import DEVICES
from omnibal_ext.costs.states import AWARE, DTYPES, add_state_flags
from omnibal_ext.flags import FURTHER_BUDGETS, Interval, Need, ToolParser, add_further_budgets

NUMBERS = (
    Interval("[1, 1e9]", f"vit_budget llm_budget {FURTHER_BUDGETS}"),
    Interval("[1, 16384]", "tensor_model_parallel_size expert_model_parallel_size data_parallel_size"),
    Interval("[1, 1000]", "steps"),
    Interval("(0, 1]", "supervised_share"),
    Interval("[0, 268435456]", "replica_ranks"),
    *adapters.NUMBERS,
)
NEEDS = (
    *adapters.NEEDS,
    Need(
        "tower_profile",
        "to be given without --analytic, which prices whole layers itself by --replica-ranks",
        lambda given: not given.analytic,
    ),
    Need("steps force", "to be given without --analytic, which measures nothing", lambda given: not given.analytic),
    Need(AWARE, "--use-distributed-optimizer", lambda given: given.use_distributed_optimizer),
    Need(AWARE, "--bf16, or --analytic", lambda given: given.bf16 or given.analytic),
    Need(" ".join(DTYPES), "--use-precision-aware-optimizer", lambda given: getattr(given, AWARE)),
)


def profile_parser(description: str | None = None) -> ToolParser:
    """Return the command line of omnibal profile."""
    parser = ToolParser(
        numbers=NUMBERS, needs=NEEDS, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(*MODEL_FLAGS, required=True, help="a preset, or a Hugging Face folder")
    add("--vit-budget", type=int, required=True, help="tiles of a full pack")
    add("--llm-budget", type=int, required=True, help="tokens of a full pack")
    add_further_budgets(add, "{units} of a full pack, for models that {verb} (default: 1)")
    add(
        "--supervised-share", type=float, default=1.0, metavar="S",
        help="of a pack's tokens, on average, those that are learnt: the head multiplies no others (default: all)",
    )  # fmt: skip
    add("--tensor-model-parallel-size", type=int, default=1)
    add("--expert-model-parallel-size", type=int, default=1, help="ranks over which a layer's experts are distributed")
    add("--sequence-parallel", action="store_true", help="the job shares tokens between blocks")
    add("--data-parallel-size", type=int, default=1, metavar="D", help="of the job: gradients are reduced over it")
    add("--use-distributed-optimizer", action="store_true", help="the job shards its optimizer state")
    add("--bf16", action="store_true", help="measure in bf16")
    add_state_flags(add)
    adapters.add_trained_flags(parser)
    add("--steps", type=int, default=5, help="steps measured, after two to warm up")
    add("--analytic", choices=sorted(DEVICES), help="estimate for this device from operation counts, measure nothing")
    add("--replica-ranks", type=int, default=0, help="pipeline x tensor ranks: also what a tower beside them costs")
    add("--tower-profile", help="profile at tensor-parallel size 1: what whole layers of a tower cost")
    add("--force", action="store_true", help="measure again, whatever is there")
    add("--output", required=True, help="profile.json to write")
    add("--json", action="store_true", help="print the profile as one JSON object")
    return parser
