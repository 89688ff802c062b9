"""Our few flags beside Megatron's own, and what a preset and a plan fill in of Megatron's."""

import argparse
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import Any

from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_global_variables

from megatron.vlm import platform
from omnibal_ext.architectures import Architecture, preset
from omnibal_ext.chain import PARTS
from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan, single_stage_plan


@dataclass(frozen=True)
class TrainingInputs:
    """What a run is started with, parsed and checked: Megatron's arguments, the model and the plan."""

    args: Namespace
    architecture: Architecture
    plan: Plan


def add_vlm_arguments(parser: ArgumentParser) -> ArgumentParser:
    """The flags that Megatron does not have."""
    group = parser.add_argument_group("vision-language model")
    group.add_argument("--preset", required=True, help="model to build, see omnibal_ext/architectures.py")
    group.add_argument("--plan", help="plan.json of tools/plan_layout.py; not needed on a single pipeline rank")
    group.add_argument("--data", help="dataset folder of tools/preprocess_data.py")
    group.add_argument("--packs", help="packed index of tools/pack_data.py over --data")
    group.add_argument("--eval-data", help="held-out dataset folder")
    group.add_argument("--eval-packs", help="packed index over --eval-data")
    group.add_argument(
        "--from",
        dest="first_weights",
        metavar="FOLDER",
        help="first weights: a converted or another run's checkpoint",
    )
    group.add_argument("--from-scratch", action="store_true", help="start from random weights")
    group.add_argument("--freeze", nargs="+", default=[], choices=tuple(PARTS), help="parts that are not trained")
    group.add_argument(
        "--loss-reduction",
        default="token",
        choices=("token", "square", "sample"),
        help="mean over the global batch's tokens, over its samples, or square-root weighting between (InternVL)",
    )
    group.add_argument("--metrics-file", help="append one JSON line an interval: balance, padding, rates")
    return parser


def parse_arguments() -> TrainingInputs:
    """Parse and validate the command line and set Megatron's globals. Raises UserError as `read_arguments` does."""
    inputs = read_arguments()
    set_global_variables(inputs.args)
    return inputs


def read_arguments() -> TrainingInputs:
    """Parse and validate the command line.

    Raises UserError for an unknown preset, a plan made for another model or parallel size, a schedule we do not run.
    """
    early = ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--pipeline-model-parallel-size", type=int)
    known, _ = add_vlm_arguments(early).parse_known_args()
    if set(known.freeze) == set(PARTS):
        raise UserError(f"--freeze {' '.join(known.freeze)} leaves nothing to train; leave one part out")
    architecture = preset(known.preset)
    plan = _load_plan(known, architecture)

    def add_with_defaults(parser: ArgumentParser) -> ArgumentParser:
        parser = add_vlm_arguments(parser)
        parser.set_defaults(**platform.megatron_defaults(), **_preset_defaults(architecture, plan))
        return parser

    platform.mend_distributed_optimizer()
    args = parse_args(add_with_defaults)
    validate_args(args)
    # The true count from here on: a checkpoint records it, and is compared with it at any layout.
    args.num_layers = args.encoder_num_layers = architecture.language.layers
    return TrainingInputs(args, architecture, plan)


def _load_plan(known: argparse.Namespace, architecture: Architecture) -> Plan:
    ranks = known.pipeline_model_parallel_size
    if known.plan is None:
        if ranks not in (None, 1):
            raise UserError(f"{ranks} pipeline ranks need --plan; make one with tools/plan_layout.py")
        return single_stage_plan(
            architecture.chain, model=architecture.name, model_hash=architecture.hash, frozen=tuple(known.freeze)
        )
    plan = Plan.load(known.plan)
    plan.check_model(architecture.name, architecture.hash)
    plan.check_frozen(known.freeze)
    if ranks not in (None, plan.pipeline_model_parallel_size):
        raise UserError(
            f"--pipeline-model-parallel-size {ranks}, but {known.plan} was made for "
            f"{plan.pipeline_model_parallel_size}; leave the flag out or plan again"
        )
    return plan


def _preset_defaults(architecture: Architecture, plan: Plan) -> dict[str, Any]:
    """Megatron's flags that follow from the model and the plan."""
    language = architecture.language
    ranks, chunks = plan.pipeline_model_parallel_size, plan.virtual_pipeline_model_parallel_size
    return {
        # Megatron insists on a number of layers that its pipeline divides; the chain has its own cuts.
        "num_layers": -(-language.layers // (ranks * chunks)) * ranks * chunks,
        "hidden_size": language.hidden_size,
        "ffn_hidden_size": language.ffn_hidden_size,
        "num_attention_heads": language.heads,
        "group_query_attention": True,
        "num_query_groups": language.kv_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": language.norm_epsilon,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": language.qkv_bias,
        "position_embedding_type": "rope",
        "rotary_base": int(language.rope_theta),
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": language.vocab_size - 1,  # NullTokenizer adds one
        "pipeline_model_parallel_size": ranks,
        "num_virtual_stages_per_pipeline_rank": chunks if chunks > 1 else None,
        "seq_length": plan.llm_budget or 4096,
        "max_position_embeddings": plan.llm_budget or 4096,
        "micro_batch_size": 1,
        "calculate_per_token_loss": True,
        "dataloader_type": "external",
        "eval_iters": 0,
        "eval_interval": 10**9,
    }
