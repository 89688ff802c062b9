"""What a save says of its run, and what a run that goes on from it must have in common with it.

The save holds the hashes of model, dataset and packs, the position in them, and the flags. Model, data and packs must
be the same, or the position means nothing; schedules of the optimizer too, unless Megatron is told which to take. What
else differs is named.
"""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.vlm.flags.obeyed import OBEYED
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.checksums import sha256_of
from omnibal_ext.errors import UserError

WITHOUT_EFFECT = {
    "save", "save_interval", "load", "log_interval", "tensorboard_dir", "num_workers", "logging_level",
    "eval_interval", "skip_train", "global_batch_size", "init_method_std", "embedding_init_method_std",
}  # fmt: skip
"""Flags that change no weight of a run that goes on, or have a check of their own."""
SCHEDULES = {
    "train_iters", "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "weight_decay",
    "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "lr_wsd_decay_style", "lr_wsd_decay_iters",
}  # fmt: skip
"""Of the learning rate and weight decay: Megatron asks which of two to take."""


def describe_run(args: Namespace, architecture: Architecture) -> dict[str, Any]:
    """What a save made now says; `args` are Megatron's, which count what was consumed."""
    return {
        "preset": args.preset,
        "model_hash": architecture.hash,
        "data": sha256_of(Path(args.data) / "manifest.json"),
        "packs": sha256_of(Path(args.packs) / "manifest.json"),
        "global_batch_size": args.global_batch_size,
        "consumed_packs": args.consumed_train_samples,
        "flags": _flags(args),
    }


def check_goes_on(run: Mapping[str, Any], args: Namespace, architecture: Architecture) -> list[str]:
    """The flags in which a run differs from what a save says of it, as "NAME NOW (was BEFORE)".

    Raises UserError if it is no continuation: another model, dataset, packs, or schedule of the optimizer.
    """
    now = describe_run(args, architecture)
    for name, what in (("model_hash", f"--model {args.preset}"), ("data", f"--data {args.data}"),
                       ("packs", f"--packs {args.packs}")):  # fmt: skip
        if run.get(name) != now[name]:
            raise UserError(
                f"{what}: not what the run was trained on so far, so its position means nothing; give that, or begin "
                "another run with these weights: --from, with a new --save"
            )
    differ = {name: f"{name} {new} (was {run['flags'][name]})" for name, new in now["flags"].items()
              if name in run.get("flags", {}) and run["flags"][name] != new}  # fmt: skip
    schedules = [said for name, said in differ.items() if name in SCHEDULES]
    if schedules and not (args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler):
        raise UserError(
            f"unlike the run so far: {', '.join(schedules)}; --override-opt-param-scheduler takes what is given now, "
            "--use-checkpoint-opt-param-scheduler what was"
        )
    return list(differ.values())


def _flags(args: Namespace) -> dict[str, str]:
    names = {name for group in OBEYED for name in group.flags} - WITHOUT_EFFECT | {"freeze", "loss_reduction"}
    values = {**vars(args), "lr_decay_iters": args.lr_decay_iters or args.train_iters}
    return {name: str(values[name]) for name in sorted(names) if name in values}
