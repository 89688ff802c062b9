"""Costs of stages whose microbatches are all alike."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from omnibal_ext.schedules.simulate import StageCosts


def uniform(microbatches: int, forward: ArrayLike, backward: ArrayLike, **others: ArrayLike) -> StageCosts:
    """Every argument is [stages]; `weight` is half of `backward` unless given, the rest 0."""
    stages = np.atleast_1d(np.asarray(forward, dtype=np.float64)).size
    given: dict[str, Any] = dict.fromkeys(("transfer", "kept", "transient", "fixed_bytes", "step"), 0.0)
    given |= {"forward": forward, "backward": backward, "weight": np.asarray(backward, dtype=np.float64) / 2}
    given |= {"late": others.get("kept", 0.0), **others}
    rows = {name: np.broadcast_to(np.asarray(v, dtype=np.float64), stages).copy() for name, v in given.items()}
    each = {
        name: np.tile(row[:, None], microbatches) for name, row in rows.items() if name not in ("fixed_bytes", "step")
    }
    return StageCosts(**{**rows, **each})
