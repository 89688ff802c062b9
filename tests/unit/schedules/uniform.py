"""Costs of stages whose microbatches are all alike."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from omnibal_ext.schedules.program import Program
from omnibal_ext.schedules.simulate import StageCosts, simulate


def uniform(microbatches: int, forward: ArrayLike, backward: ArrayLike, **others: ArrayLike) -> StageCosts:
    """Every argument is [stages]; `weight` is half of `backward` unless given, the rest 0."""
    stages = np.atleast_1d(np.asarray(forward, dtype=np.float64)).size
    given: dict[str, Any] = {"forward": forward, "backward": backward}
    given["weight"] = np.asarray(backward, dtype=np.float64) / 2
    given |= dict.fromkeys(("transfer", "kept", "transient", "fixed_bytes", "step"), 0.0)
    given["late"] = others.get("kept", 0.0)
    given |= others
    per_stage = {name: np.broadcast_to(np.asarray(v, dtype=np.float64), stages) for name, v in given.items()}
    return StageCosts(
        **{
            name: value.copy() if name in ("fixed_bytes", "step") else np.tile(value[:, None], microbatches)
            for name, value in per_stage.items()
        }
    )


def step_seconds(program: Program, costs: StageCosts) -> float:
    """Of one play."""
    return simulate(program, costs).step_seconds
