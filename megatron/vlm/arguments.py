"""Our few flags next to Megatron's own, and the reading of all."""

import argparse
import io
import math
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from megatron.core.utils import get_te_version, is_te_min_version
from megatron.training.arguments import parse_args, validate_args
from megatron.training.global_vars import set_global_variables

from megatron.vlm import core_patches, log_noise, platform
from megatron.vlm.defaults import FIXED, preset_defaults
from megatron.vlm.evaluation import set_evaluation
from megatron.vlm.flags.parser import Parser, megatron_refusals, missing_needs, refused_values, untested
from omnibal_ext.adapters import Adapters, check_adapters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.expert_ranks import check_expert_ranks
from omnibal_ext.architectures.presets import MODEL_FLAGS, preset
from omnibal_ext.chain import PARTS
from omnibal_ext.errors import UserError
from omnibal_ext.flags import in_stores, refuse
from omnibal_ext.plan import Plan, single_stage_plan
from omnibal_ext.schedules.schedule import splits_backward
from omnibal_ext.trainer_flags import TRAINER_FLAGS

Made = TypeVar("Made")
SPLITS_SINCE = "2.8.0"
"""First Transformer Engine whose layers call the data-parallel hooks of weight gradients that were put off."""
NCCL_TRACE = "nccl_trace_rank_"
"""Beginning of the names of these files, one a rank."""


@dataclass(frozen=True)
class TrainingInputs:
    """What a run is started with, parsed and checked: Megatron's arguments, the model and the plan."""

    args: Namespace
    architecture: Architecture
    plan: Plan
    untested: tuple[str, ...]
    """The flags given that no test of ours runs."""
    megatron_output: str
    """What Megatron printed meanwhile: its list of all arguments."""


def add_vlm_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add the trainer's own flags to Megatron's parser; return the parser."""
    group = parser.add_argument_group("vision-language model")
    add = group.add_argument
    add(
        *MODEL_FLAGS,
        dest="preset",
        metavar="MODEL",
        help="model to build: a preset, or a folder with Hugging Face's config.json",
    )
    add("--plan", help="plan.json of omnibal plan; not needed on a single pipeline rank")
    add("--data", help="dataset folder of omnibal preprocess")
    add("--packs", help="packed index of omnibal pack over --data")
    add("--eval-data", help="held-out dataset folder, evaluated on whole")
    add("--eval-packs", help="packed index over --eval-data")
    add("--from", dest="first_weights", metavar="FOLDER", help="first weights: a converted or another run's checkpoint")
    add("--from-scratch", action="store_true", help="start from random weights")
    add("--fresh", action="store_true", help="refuse to go on with a run: --save must hold none")
    add("--save-hf", action="store_true", help="write Hugging Face's weights next to every save")
    for add_ours in TRAINER_FLAGS.values():
        add_ours(group)
    return parser


def parse_arguments(argv: Sequence[str] | None = None) -> TrainingInputs:
    """Parse and validate the command line, and set Megatron's globals. Raises UserError as `read_arguments` does."""
    inputs = read_arguments(argv)
    with megatron_refusals(), redirect_stdout(io.StringIO()) as said:
        set_global_variables(inputs.args)
    return replace(inputs, megatron_output=inputs.megatron_output + said.getvalue())


def read_arguments(argv: Sequence[str] | None = None, is_packed: bool = True) -> TrainingInputs:
    """Parse and validate the command line, or `argv`; `is_packed`: read the held-out packs, to set flags of evaluation.

    Raises UserError with a line each for all flags that are unknown, refused (docs/flags.md) or at odds with the preset
    or the plan, an unknown preset, a plan made for another model or parallel size; else for what Megatron itself
    refuses, or for held-out data without packs.
    """
    parser = Parser(add_vlm_arguments, sys.argv[1:] if argv is None else argv)
    given = parser.given()
    refused = [*parser.refused, *_missing(given, parser), *in_stores(vars(given), parser.written)]
    usual = {action.dest: action.default for action in parser._actions} | {"pipeline_model_parallel_size": None}
    known = Namespace(**usual | vars(given))
    architecture = _or_refused(refused, partial(_model, known)) if known.preset else None
    plan = _or_refused(refused, partial(_plan, known, architecture)) if architecture else None
    parser.set_defaults(**platform.megatron_defaults(), **FIXED, **_flight_recorder(given))
    if architecture:
        parser.set_defaults(**preset_defaults(architecture, plan or single_stage_plan(architecture.chain), known))
    refused += refused_values(given, parser, architecture is not None, plan is not None or not known.preset)
    args, said = _parsed(parser, given, refused)
    assert architecture
    assert plan
    _check_fp8(args, architecture)
    stage_ranks = args.tensor_model_parallel_size, args.data_parallel_size
    check_expert_ranks(architecture, args.expert_model_parallel_size, stage_ranks)
    _check_experts(args)
    if is_packed:
        set_evaluation(args)
    args.align_param_gather = args.overlap_param_gather  # the executor starts all gathers, not one the next
    # The true count from here on: a checkpoint records it, and is compared with it at any layout.
    args.num_layers = args.encoder_num_layers = architecture.language.layers
    if args.num_experts:  # in lists: Megatron's log would find the name of another balance loss within this one's
        args.moe_router_load_balancing_type = [args.moe_router_load_balancing_type]
        args.moe_aux_loss_coeff = [args.moe_aux_loss_coeff]
        # Routers alone count in the log's means.
        args.moe_layer_freq = [int(layer.experts is not None) for layer in architecture.language.each_layer]
    if args.logging_level is None:
        log_noise.quieten_start_up()
    return TrainingInputs(args, architecture, plan, untested(given, parser), said)


def _or_refused(refused: list[str], make: Callable[[], Made]) -> Made | None:
    """Return what `make` returns; None if it raises UserError, whose lines are added to `refused`."""
    try:
        return make()
    except UserError as error:
        refused += error.lines
        return None


def _model(known: Namespace) -> Architecture:
    """Return the model of --model. Raises UserError if there is none, or if the flags leave nothing in it to train."""
    if set(known.freeze) == set(PARTS):
        raise UserError(f"--freeze {' '.join(known.freeze)} leaves nothing to train; leave one part out")
    architecture = preset(known.preset)
    check_adapters(Adapters.of(known), architecture)
    return architecture


def _plan(known: Namespace, architecture: Architecture) -> Plan:
    """Return the given plan, else that of one stage. Raises UserError if it does not suit model, ranks or machine."""
    check_expert_ranks(architecture, known.expert_model_parallel_size)
    plan = _load_plan(known, architecture)
    _check_split_backward(plan)
    return plan


def _parsed(parser: Parser, given: Namespace, refused: Sequence[str]) -> tuple[Namespace, str]:
    """Return all arguments, validated by Megatron, and what it printed meanwhile.

    Raises UserError with the lines of `refused` and those of flags that lack others, or with what Megatron refuses.
    """
    core_patches.install()
    with megatron_refusals(), redirect_stdout(io.StringIO()) as said:
        args = parse_args(lambda _: parser)
        refuse([*refused, *missing_needs(given, args, parser)])
        return validate_args(args), said.getvalue()


def _flight_recorder(given: Namespace) -> dict[str, str]:
    """Return a default with which NCCL writes, next to the metrics, what each rank had under way at a timeout.

    Megatron passes it on to torch, and leaves what the user's environment says. {} without GPUs or metrics.
    """
    if not platform.HAS_CUDA or "metrics_file" not in given:
        return {}
    return {"flight_recorder_dump_path": str(Path(given.metrics_file).with_name(NCCL_TRACE))}


def _missing(given: Namespace, parser: Parser) -> list[str]:
    """Return a line for each flag that every run needs and lacks; set a default for it, to judge the others."""
    wanted = {
        "preset": (None, "--model is missing; give a preset, or a folder with Hugging Face's config.json"),
        "lr": (math.inf, "--lr is missing; give the learning rate"),
        "train_iters": (2**62, "--train-iters is missing; give it, or --epochs to omnibal launch"),
    }
    missing = {name: line for name, (_, line) in wanted.items() if getattr(given, name, None) is None}
    parser.set_defaults(**{name: wanted[name][0] for name in missing})
    return [*missing.values()]


def _check_split_backward(plan: Plan) -> None:
    """Raise UserError if the plan delays weight gradients and Transformer Engine is too old to reduce them then."""
    if platform.HAS_TRANSFORMER_ENGINE and splits_backward(plan.schedule) and not is_te_min_version(SPLITS_SINCE):
        raise UserError(
            f"schedule {plan.schedule} computes weight gradients apart, which Transformer Engine {get_te_version()} "
            f"cannot reduce: {SPLITS_SINCE} is the first; upgrade it, or plan again with --schedule 1f1b"
        )


def _check_fp8(args: Namespace, architecture: Architecture) -> None:
    """Raise UserError for --fp8-format where a layer or this machine cannot take it, or scales would be wrong."""
    if not args.fp8:
        return
    if any(layer.linear for layer in architecture.language.each_layer):
        raise UserError(
            f"--fp8-format {args.fp8}: what linear attention projects to makes no whole blocks of eight bits; leave it "
            "out"
        )
    if not platform.HAS_TRANSFORMER_ENGINE:
        raise UserError(f"--fp8-format {args.fp8} needs Transformer Engine, which is not here; leave it out")
    if args.fp8_recipe == "delayed":
        raise UserError(
            f"--fp8-format {args.fp8} without --fp8-recipe is delayed scaling, which learns its scales over all layers "
            "at once, and stages have some; give --fp8-recipe tensorwise, blockwise or mxfp8"
        )


def _check_experts(args: Namespace) -> None:
    """Raise UserError for flags by which experts would be computed or loaded wrongly, or that do nothing to them."""
    if args.num_experts is None:
        if args.moe_aux_loss_coeff:
            raise UserError(f"--moe-aux-loss-coeff {args.moe_aux_loss_coeff}: --model has no experts; leave it out")
        return
    if args.tensor_model_parallel_size > 1 and not args.sequence_parallel:
        raise UserError(
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size} with {args.num_experts} experts needs "
            "--sequence-parallel: without, each rank would route all tokens; give that too"
        )
    if args.expert_model_parallel_size > 1 and args.fp16 and not args.loss_scale:
        raise UserError(
            f"--fp16 with --expert-model-parallel-size {args.expert_model_parallel_size}: core learns a loss scale for "
            "the experts apart from the one that the loss is scaled by; give --bf16, or --loss-scale"
        )
    if args.dist_ckpt_optim_fully_reshardable:
        raise UserError(
            "--dist-ckpt-optim-fully-reshardable: core mixes up the experts' weights where it loads what it saved so; "
            "leave it out"
        )
    if args.fp8:
        raise UserError(
            f"--fp8-format {args.fp8}: experts multiply in the model's precision, which is most of what this model "
            "does; leave it out"
        )


def _load_plan(known: argparse.Namespace, architecture: Architecture) -> Plan:
    ranks, adapters = known.pipeline_model_parallel_size, Adapters.of(known)
    frozen = adapters.frozen(known.freeze)
    if known.plan is None:
        if ranks not in (None, 1):
            raise UserError(f"{ranks} pipeline ranks need --plan; make one with omnibal plan")
        return single_stage_plan(
            architecture.chain,
            model=architecture.name,
            model_hash=architecture.hash,
            trained=adapters.trained(known.freeze),
        )
    plan = Plan.load(known.plan)
    plan.check_model(architecture)
    plan.check_trained(frozen, adapters)
    if ranks not in (None, plan.pipeline_model_parallel_size):
        raise UserError(
            f"--pipeline-model-parallel-size {ranks}, but {known.plan} was made for "
            f"{plan.pipeline_model_parallel_size}; leave the flag out or plan again"
        )
    return plan
