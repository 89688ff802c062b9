"""What a save records of its run, and whether a run can resume from it.

A save has hashes of model, dataset and packs, the position in them, and the flags. Model, dataset and packs must be the
same, or the position means nothing; so must the optimizer's schedules, unless a Megatron flag says which to use. The
optimizer state fits only an optimizer with the same tensors, and a distributed one only with the same buckets. Other
flags that differ are reported.
"""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.vlm.flags.lists import OBEYED, each
from omnibal_ext.adapters import Adapters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.huggingface import model_name
from omnibal_ext.costs.states import state_words
from omnibal_ext.errors import UserError
from omnibal_ext.files.records import sha256_of
from omnibal_ext.identity import content_hash
from omnibal_ext.plan import Plan
from omnibal_ext.reading.checks import anything, mapping
from omnibal_ext.reading.document import read_json
from omnibal_ext.trainer_flags import DECAYS, RATES

MANIFEST = "manifest.json"
BEHIND = " (behind -- of omnibal launch)"
"""Appended to remedies: omnibal launch takes the trainer's flags there."""
WITHOUT_EFFECT = {
    "save", "save_interval", "load", "log_interval", "tensorboard_dir", "num_workers", "logging_level",
    "eval_interval", "skip_train", "global_batch_size", "init_method_std", "embedding_init_method_std",
}  # fmt: skip
"""Flags that do not change the weights of a resumed run, or have a separate check."""
SCHEDULES = {
    "train_iters", "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "weight_decay",
    "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "lr_wsd_decay_style", "lr_wsd_decay_iters",
    *RATES, *DECAYS,
}  # fmt: skip
"""Flags of learning rate and weight decay; if they differ, Megatron has flags that say which to use."""
GROUPED_BY = ("lr", "min_lr")
"""Flags by whose values core 0.19 looks up the state of a parameter group."""


def describe_run(args: Namespace, architecture: Architecture, plan: Plan) -> dict[str, Any]:
    """Return the record for a save made now; `args`: Megatron's, with the number of consumed packs."""
    return {
        "preset": args.preset,
        "from": args.first_weights and str(Path(args.first_weights).resolve()),
        "model": architecture.name,
        "model_hash": architecture.hash,
        "data": _content(args.data),
        "packs": _content(args.packs),
        "global_batch_size": args.global_batch_size,
        "consumed_packs": args.consumed_train_samples,
        "expert_ranks": args.expert_model_parallel_size,
        "adapters": Adapters.of(args).to_record(),
        "optimizer": None if args.no_save_optim else _optimizer(args),
        "buckets": None if args.dist_ckpt_optim_fully_reshardable else _buckets(args, plan),
        "flags": _flags(args),
    }


def check_resumable(
    run: Mapping[str, Any], args: Namespace, architecture: Architecture, plan: Plan, is_planned: bool = True
) -> list[str]:
    """Return the flags that differ from the saved run's, as "NAME NOW (was BEFORE)".

    `is_planned`: whether the plan is final; before that the optimizer's buckets are unknown and not compared.
    Raises UserError if model, dataset, packs or the optimizer's schedules differ, or if the optimizer state was not
    saved, or does not fit the optimizer, expert-parallel size or buckets.
    """
    now = describe_run(args, architecture, plan)
    _check_same(run, now, args, architecture)
    differ = {name: f"{name} {new} (was {run['flags'][name]})" for name, new in now["flags"].items()
              if name in run.get("flags", {}) and run["flags"][name] != new}  # fmt: skip
    loads_optimizer = not (args.finetune or args.no_load_optim)
    if loads_optimizer and (rates := [differ[name] for name in GROUPED_BY if name in differ]):
        raise UserError(
            f"unlike the run so far: {', '.join(rates)}, by which Megatron finds the optimizer's state; use the "
            f"same values, or load the weights alone: --no-load-optim --override-opt-param-scheduler{BEHIND}"
        )
    schedules = [said for name, said in differ.items() if name in SCHEDULES]
    if schedules and not (args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler):
        raise UserError(
            f"unlike the run so far: {', '.join(schedules)}; --override-opt-param-scheduler uses the new values, "
            f"--use-checkpoint-opt-param-scheduler the saved ones{BEHIND}"
        )
    if loads_optimizer:
        _check_optimizer(run.get("optimizer", {}), _optimizer(args))
        _check_expert_ranks(run.get("expert_ranks", 1), args.expert_model_parallel_size)
        if is_planned and (saved := run.get("buckets")):
            _check_buckets(saved, _buckets(args, plan) or {})
    return list(differ.values())


def _check_same(run: Mapping[str, Any], now: Mapping[str, Any], args: Namespace, architecture: Architecture) -> None:
    """Raise UserError if a save's `run` has another model, dataset or packs than `now`. Older saves know the model by
    --model only, the others by the SHA-256 of their manifests."""
    name = str(run.get("model") or model_name(Path(run.get("preset") or "")))
    alike = {f"--model {args.preset}": architecture.was_noted(name, str(run.get("model_hash")))}
    for what, folder in (("data", args.data), ("packs", args.packs)):
        alike[f"--{what} {folder}"] = run.get(what) in (now[what], sha256_of(Path(folder) / MANIFEST))
    for what, same in alike.items():
        if not same:
            raise UserError(
                f"{what}: not what the run was trained on so far, so its position means nothing; give that, or begin "
                "another run with these weights: --from, with a new --save"
            )


def _content(folder: str) -> str:
    """Return the hash of what is in a dataset or packed index, from its manifest."""
    return content_hash(read_json(Path(folder) / MANIFEST, mapping(anything), "give what the run was started with"))


def _check_expert_ranks(saved: int, now: int) -> None:
    """Raise UserError for another expert-parallel size: core keeps the state of experts in a separate optimizer."""
    if saved != now:
        raise UserError(
            f"--expert-model-parallel-size {now}, but the optimizer's state was saved with {saved}; use that size, "
            f"or load the weights alone, which fit any size: --no-load-optim{BEHIND}"
        )


def _optimizer(args: Namespace) -> dict[str, Any]:
    """Return the settings that determine which tensors the optimizer state has, by flag."""
    scaler = "constant" if args.loss_scale else "dynamic" if args.fp16 else None  # None matches both
    return {
        "--optimizer": args.optimizer,
        "--sgd-momentum above 0": args.optimizer == "sgd" and args.sgd_momentum > 0,
        "--bf16 or --fp16": bool(args.bf16 or args.fp16),
        "--use-distributed-optimizer": bool(args.use_distributed_optimizer),
        "precision of states": " ".join(state_words(args)[1:]) or "fp32",
        "loss scale": scaler,
        "frozen": sorted(args.freeze),
        "rates of parts": [f"{name} {vars(args)[name]}" for name in (*RATES, *DECAYS) if vars(args)[name] is not None],
    }


def _check_optimizer(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Raise UserError for another optimizer; `saved`: None if no state was saved, empty in saves of older versions."""
    remedy = f"load the weights alone: --no-load-optim{BEHIND}"
    if saved is None:
        raise UserError(
            "the run was saved without the optimizer's state (--no-save-optim) and cannot go on as if nothing had "
            f"happened; {remedy}, or begin another run with the weights: --from, with a new --save"
        )
    differ = [
        f"{flag} {value} (was {saved[flag]})"
        for flag, value in now.items()
        if None not in (value, saved.get(flag)) and flag != "frozen" and value != saved[flag]
    ]
    differ += [f"{part} trained (was frozen)" for part in saved.get("frozen", ()) if part not in now["frozen"]]
    if differ:
        raise UserError(
            f"the optimizer's state was saved for another one: {', '.join(differ)}; use the same settings, or {remedy}"
        )


def _buckets(args: Namespace, plan: Plan) -> dict[str, Any] | None:
    """Return what decides the distributed optimizer's buckets of state (core's "dp_reshardable"); None without one."""
    if not args.use_distributed_optimizer:
        return None
    largest = args.ddp_bucket_size or max(40_000_000, 1_000_000 * args.data_parallel_size)  # as core's DDP
    return {
        "layers of stages": [list(stage.layers) for stage in plan.stages],
        "owners of the tower": list(plan.tower.owners) if plan.tower else None,
        "pipeline ranks": plan.pipeline_model_parallel_size,
        "tensor-parallel ranks": args.tensor_model_parallel_size,
        "weights in a bucket": largest if args.overlap_grad_reduce else None,
        "buckets": args.ddp_num_buckets,
        "frozen parts": list(args.freeze),
        "bf16": args.bf16,
        "fp16": args.fp16,
    }


def _check_buckets(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if unlike := [f"{name} {now.get(name)} (was {value})" for name, value in saved.items() if now.get(name) != value]:
        raise UserError(
            f"the state of the distributed optimizer was saved for other buckets: {'; '.join(unlike)}; use the same "
            "plan (--plan) and flags (state saved with --dist-ckpt-optim-fully-reshardable fits any), or load the "
            f"weights alone: --no-load-optim{BEHIND}"
        )


def _flags(args: Namespace) -> dict[str, str]:
    ours = {"freeze", "loss_reduction", *RATES, *DECAYS}
    names = each(OBEYED).keys() - WITHOUT_EFFECT | ours
    values = {**vars(args), "lr_decay_iters": args.lr_decay_iters or args.train_iters}
    return {name: str(values[name]) for name in sorted(names) if name in values}
