"""Correction of a profile by what a run measured: each part's seconds are scaled by measured / profile."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from omnibal_ext.chain import AS_LAYERS, TIMED_PART_OF, chain_kind
from omnibal_ext.costs.profile import LayerCost, Profile

OTHER, EXCHANGE, UPDATE, WHOLE = "other", "exchange", "update", "whole step"
"""Compared besides the parts of the model: the executor, messages between ranks that share a pack, gradient reduction
with the optimizer step, and the entire iteration up to its last rank."""
FORWARD = (
    "forward_seconds", "forward_fit", "recompute_seconds", "recompute_cheap_seconds", "split_forward_seconds",
)  # fmt: skip
"""Fields of `LayerCost` that are scaled by the ratio of forwards."""
BACKWARD = ("backward_seconds", "backward_fit", "weight_gradient_seconds", "split_backward_seconds", "empty_seconds")
EXCHANGED = ("exchange_seconds", "exchange_key_seconds")


@dataclass(frozen=True, slots=True)
class Compared:
    """Mean seconds per rank and iteration, by the profile and measured, of a part of the model in a phase ("forward",
    "backward", "recompute", "weight"); or of executor, exchange, update or the whole step (`OTHER` .. `WHOLE`)."""

    part: str
    phase: str
    profile_seconds: float
    measured_seconds: float


def corrected(profile: Profile, compared: Collection[Compared], by: Mapping[str, Any]) -> Profile:
    """Return the profile with the seconds of each part scaled to those measured, host and transfer seconds unchanged.

    Measured backwards contain recomputation: its predicted seconds, scaled as forwards, are subtracted first. A
    projector that was measured together with the ViT is scaled as the ViT. A part that did not run, or has 0 seconds
    in the profile, is unchanged. `by`: the new profile's `corrected_by`.
    """
    other, exchange, update = (_ratio(_of(compared, part).values()) for part in (OTHER, EXCHANGE, UPDATE))

    def cost_of(kind: str, cost: LayerCost) -> LayerCost:
        part = TIMED_PART_OF[chain_kind(kind)]
        forward, backward = _of_passes(_of(compared, part) or _of(compared, AS_LAYERS.get(part, part)))
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
    """Return (profile seconds, measured seconds) of a part, by phase."""
    return {one.phase: (one.profile_seconds, one.measured_seconds) for one in compared if one.part == part}


def _of_passes(phases: dict[str, tuple[float, float]]) -> tuple[float, float]:
    """Return measured / profile seconds of a part's forwards and of its backwards, from both by phase."""
    forward = _ratio([phases.get("forward", (0.0, 0.0))])
    recompute = forward * phases.get("recompute", (0.0, 0.0))[0]
    planned = sum(phases[phase][0] for phase in phases if phase not in ("forward", "recompute"))
    measured = sum(phases[phase][1] for phase in phases if phase != "forward")
    return forward, _ratio([(planned, measured - recompute)])


def _ratio(compared: Collection[tuple[float, float]]) -> float:
    """Return measured / profile seconds, each summed; 1 if either sum is 0."""
    planned, measured = (sum(seconds) for seconds in zip((0.0, 0.0), *compared, strict=True))
    return measured / planned if planned > 0 and measured > 0 else 1.0


def _scaled(seconds: Any, factor: float) -> Any:
    """Return `factor` times seconds or a fit; None stays None."""
    if isinstance(seconds, tuple):
        return tuple(figure * factor for figure in seconds)
    return None if seconds is None else seconds * factor
