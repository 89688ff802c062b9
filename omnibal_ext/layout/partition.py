"""Cuts of the chain: the paper's three baselines, and its candidates around the profile-based anchor (BMP).

All work on one number a layer and return edges (0, ..., layers): stage s holds layers edges[s] .. edges[s + 1] - 1.
"""

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from omnibal_ext.chain import RECOMPUTABLE_KINDS, chain_kind
from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError
from omnibal_ext.layout.problem import Edges, LayoutProblem

NEGLIGIBLE_SPREAD = 1e-4
"""Share of the mean by which scores are normalised instead where the anchor is level or carries nothing."""


def even_edges(weights: ArrayLike, stages: int) -> Edges:
    """Cut the chain as evenly as one greedy pass over prefix sums can (the paper's rule); return the edges.

    1. Cut s of N belongs where the sum of the layers before it is s / N of the total.
    2. From the first cut to the last, take the boundary nearest to that (ties: the earlier) among those that leave
       every stage, before and after, at least one layer.

    Raises UserError where there are more stages than layers.
    """
    w = np.asarray(weights, dtype=np.float64)
    if stages > w.size:
        raise UserError(f"{stages} stages asked of a chain of {w.size} layers; use fewer pipeline ranks")
    prefix = np.concatenate([[0.0], np.cumsum(w)])
    edges = [0]
    for s in range(1, stages):
        first, last = edges[-1] + 1, w.size - (stages - s)
        distance = np.abs(prefix[first : last + 1] - prefix[-1] * s / stages)
        edges.append(first + int(np.argmin(distance)))
    return (*edges, w.size)


def layer_weights(problem: LayoutProblem, method: str) -> NDArray[np.float64]:
    """Return what `method` spreads evenly, by layer: parameters; 1 for a ViT or LLM layer (0 for others); or mean
    forward seconds. Raises UserError for "parameters" where the profile lacks them."""
    profile = problem.profile
    if method == "parameters":
        missing = [kind for kind in profile.chain if kind not in profile.parameters]
        if missing:
            raise UserError(
                f"layer {missing[0]}: the profile has no parameters; profile again, or use another --method"
            )
        own = [kind if kind in profile.parameters else chain_kind(kind) for kind in profile.cost_kinds]
        return np.array([profile.parameters[kind] for kind in own], dtype=np.float64)
    if method == "layers":
        return np.array([kind in RECOMPUTABLE_KINDS for kind in profile.chain], dtype=np.float64)
    return problem.per_layer(problem.tables.forward.mean(axis=(1, 2)))


def cut_bytes(profile: Profile) -> NDArray[np.float64]:
    """Return the bytes sent to the next stage if the chain is cut right behind each layer: float64 [layers]."""
    output = np.array([profile.layers[kind].output_bytes for kind in profile.chain])
    carried = output * (1 + np.array(profile.features_after))
    for kind, passing in profile.tokens_after.items():
        carried += np.array(passing) * profile.layers[kind].output_bytes
    return np.asarray(carried)


def bmp_candidates(problem: LayoutProblem, radius: int, top_k: int) -> list[Edges]:
    """Return the `top_k` best cuts within `radius` layers of the profile-based anchor, best first (OmniBal, section
    4.2).

    score = VAR(forward time of the stages) / anchor's VAR + SUM(bytes at the cuts) / anchor's SUM. The paper ranks by
    VAR and SUM without saying how they are weighed; dividing by the anchor's makes both one at the anchor.

    1. Anchor: the even cut by forward time.
    2. Each cut may move up to `radius` layers either way, stages stay non-empty.
    3. Both terms are sums over stages, so a dynamic program that keeps the K best at each position of each cut is
       exact, also where (2 radius + 1)^(stages - 1) candidates could not be listed.
    """
    stages = problem.stages
    forward = layer_weights(problem, "profile")
    anchor = even_edges(forward, stages)
    prefix = np.concatenate([[0.0], np.cumsum(forward)])
    mean = prefix[-1] / stages
    carried = cut_bytes(problem.profile)
    spread = max(spread_of(forward, anchor), NEGLIGIBLE_SPREAD * mean**2)
    volume = max(
        float(carried[np.array(anchor[1:-1], dtype=int) - 1].sum()), NEGLIGIBLE_SPREAD * carried.mean(), 1e-300
    )

    def stage_score(first: int, end: int) -> float:
        carried_out = carried[end - 1] / volume if end < forward.size else 0.0
        return float((prefix[end] - prefix[first] - mean) ** 2 / spread + carried_out)

    lists: dict[int, list[tuple[float, Edges]]] = {0: [(0.0, (0,))]}
    for s in range(1, stages + 1):
        reach = radius if s < stages else 0
        following: dict[int, list[tuple[float, Edges]]] = {}
        for end in range(max(1, anchor[s] - reach), min(forward.size, anchor[s] + reach) + 1):
            longer = [
                (score + stage_score(edges[-1], end), (*edges, end))
                for first, kept in lists.items()
                if first < end
                for score, edges in kept
            ]
            if longer:
                following[end] = heapq.nsmallest(top_k, longer)
        lists = following
    return [edges for _, edges in lists[forward.size]]


def spread_of(weights: ArrayLike, edges: Sequence[int]) -> float:
    """Return the paper's VAR: sum over stages of (stage's sum - mean)^2."""
    w = np.asarray(weights, dtype=np.float64)
    sums = np.array([w[first:end].sum() for first, end in pairwise(edges)])
    return float(((sums - sums.mean()) ** 2).sum())
