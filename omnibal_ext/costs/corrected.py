"""A profile corrected by what a run measured: its seconds, part by part of the model, scaled by how long they took."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from omnibal_ext.chain import KIND_OF, TIMED_PART_OF
from omnibal_ext.costs.profile import LayerCost, Profile

OTHER, EXCHANGE, UPDATE, WHOLE = "other", "exchange", "update", "whole step"
"""What is compared beside the parts of the model: executor, messages between ranks of a pack, reduction and optimizer
step, and the iteration from its start to the last rank's end."""
FORWARD = ("forward_seconds", "forward_fit", "recompute_seconds", "recompute_cheap_seconds")
"""Costs of a layer that are scaled as its forwards."""
BACKWARD = ("backward_seconds", "backward_fit", "weight_gradient_seconds", "split_backward_seconds", "empty_seconds")
EXCHANGED = ("exchange_seconds", "exchange_key_seconds")


@dataclass(frozen=True, slots=True)
class Compared:
    """Seconds of a rank and iteration, on average: of a part of the model (`omnibal_ext.chain.TIMED_PART_OF`) in a
    phase ("forward", "backward", "recompute", "weight"), or of one of those above."""

    part: str
    phase: str
    profile_seconds: float
    measured_seconds: float


def corrected(profile: Profile, compared: Collection[Compared], by: Mapping[str, Any]) -> Profile:
    """The profile with seconds that say of each part what was measured; those of hosts and transfers stay.

    Layers that are run again cost a forward more: what they were predicted to take, scaled as forwards, is taken from
    what backwards took. A projector that was not told from the ViT is scaled as that. A part that did not run, or that
    the profile has no seconds of, stays as it is.
    by: what the profile says of where this comes from.
    """
    other, exchange, update = (_ratio(_of(compared, part).values()) for part in (OTHER, EXCHANGE, UPDATE))

    def cost_of(kind: str, cost: LayerCost) -> LayerCost:
        part = TIMED_PART_OF[KIND_OF.get(kind, kind)]
        alike = "vit" if part == "projector" else part
        forward, backward = _of_passes(_of(compared, part) or _of(compared, alike))
        factors = {**dict.fromkeys(FORWARD, forward), **dict.fromkeys(BACKWARD, backward)}
        factors |= {**dict.fromkeys(EXCHANGED, exchange), "step_seconds": update}
        return replace(cost, **{name: _scaled(getattr(cost, name), factor) for name, factor in factors.items()})

    return replace(
        profile,
        layers={kind: cost_of(kind, cost) for kind, cost in profile.layers.items()},
        whole_layers={kind: cost_of(kind, cost) for kind, cost in profile.whole_layers.items()},
        action_seconds=profile.action_seconds * other,
        iteration_seconds=profile.iteration_seconds * update,
        corrected_by=dict(by),
    )


def _of(compared: Collection[Compared], part: str) -> dict[str, tuple[float, float]]:
    """By phase, seconds of the profile and measured ones."""
    return {one.phase: (one.profile_seconds, one.measured_seconds) for one in compared if one.part == part}


def _of_passes(phases: dict[str, tuple[float, float]]) -> tuple[float, float]:
    """By what forwards and backwards of a part are to be scaled."""
    forward = _ratio([phases.get("forward", (0.0, 0.0))])
    again = forward * phases.get("recompute", (0.0, 0.0))[0]
    planned = sum(phases[phase][0] for phase in phases if phase not in ("forward", "recompute"))
    measured = sum(phases[phase][1] for phase in phases if phase != "forward")
    return forward, _ratio([(planned, measured - again)])


def _ratio(compared: Collection[tuple[float, float]]) -> float:
    """Measured seconds over those of the profile; 1 where either has none."""
    planned, measured = (sum(seconds) for seconds in zip((0.0, 0.0), *compared, strict=True))
    return measured / planned if planned > 0 and measured > 0 else 1.0


def _scaled(seconds: Any, factor: float) -> Any:
    """A figure, a fit of three, or None."""
    if isinstance(seconds, tuple):
        return tuple(figure * factor for figure in seconds)
    return None if seconds is None else seconds * factor
