"""Learning rates and weight decay per part of the model (ViT, projector, LLM), by core's parameter group overrides.

A part's rate follows the run's schedule, with --min-lr scaled by the same factor. Vectors and biases are decayed in no
part.
"""

import re
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron.core.optimizer import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.training import training

from omnibal_ext.adapters import Adapters
from omnibal_ext.chain import PART_OF, PARTS, VISION_NORM, modality_of
from omnibal_ext.flags import Need
from omnibal_ext.trainer_flags import PARTS_WITH_RATES, RATES


def trained_parts(args: Namespace) -> set[str]:
    """Return the parts of the model that are trained, by their weights or by adapters."""
    adapters = Adapters.of(args)
    return set(adapters.targets) if adapters.rank else set(PARTS) - set(args.freeze)


def _rated(args: Namespace) -> set[str]:
    return {part for part in PARTS_WITH_RATES if getattr(args, f"lr_{part}") is not None}


def _trains(part: str) -> Any:
    return lambda args: part in trained_parts(args)


NEEDS = (
    *(Need(f"lr_{part} weight_decay_{part}", f"a {part} that is trained", _trains(part)) for part in PARTS_WITH_RATES),
    Need(
        " ".join(RATES),
        "another part that is trained at --lr; give that one rate as --lr",
        lambda args: bool(trained_parts(args) - _rated(args)),
    ),
    Need(
        "lr_warmup_init",
        "rates of parts that are no lower",
        lambda args: all(args.lr_warmup_init <= getattr(args, f"lr_{part}") for part in _rated(args)),
    ),
)


def part_overrides(args: Namespace) -> dict[ParamKey, ParamGroupOverride]:
    """Return core's overrides that give a part of the model its own learning rate or weight decay, where set."""
    found = {}
    for part in PARTS_WITH_RATES:
        rate, decay = getattr(args, f"lr_{part}"), getattr(args, f"weight_decay_{part}")
        override = ParamGroupOverride()
        if rate is not None:
            override |= {"max_lr": rate, "min_lr": args.min_lr * rate / args.lr if args.lr else 0.0}
        if decay is not None:
            override |= {"start_wd": decay, "end_wd": decay}
        if override:
            weights = ParamWithNamePredicate(name=f"of the {part}", fn=_of_part(part))
            found[ParamKey(with_name_predicate=weights)] = override
    return found


OF_ENCODER = re.compile(rf"links\.(\w+)\.{VISION_NORM}\.")
"""Name of a norm in a projector's layer that is counted among its encoder's layers."""


def _of_part(part: str) -> Callable[[Any, str], bool]:
    """Return a predicate (weight, name in the stage) for core: whether a weight is of this part of the model."""
    names = re.compile(rf"links\.({'|'.join(PARTS[part])})(_\d+)?\.")

    def is_of(_: Any, name: str) -> bool:
        if norm := OF_ENCODER.search(name):
            return part == PART_OF[modality_of(norm[1]).kinds[1]]
        return bool(names.search(name))

    return is_of


def install() -> None:
    """Have Megatron's loop create its optimizer with `part_overrides`."""
    plain = training.get_megatron_optimizer_config

    def with_parts(args: Namespace) -> Any:
        config, overrides = plain(args)
        return config, {**overrides, **part_overrides(args)}

    training.get_megatron_optimizer_config = with_parts
