"""Playing lists with a tower beside the pipeline: the compiled loops of `simulate` with E and V, and what they take.

F of the first stage begins when its own rank is free and the last E of its microbatch has arrived
V begins when its own rank is free and the gradient of the first stage's B has arrived
a hop later where that is another rank; hops overlap with work and do not queue
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from omnibal_ext.arrays import Floats, Ints

FORWARD, BACKWARD, WEIGHT, ENCODE, VISION_BACKWARD = 0, 1, 2, 3, 4


class Encoding(NamedTuple):
    """What a tower beside the pipeline takes."""

    seconds: Floats
    """[2, ranks, microbatches] Of E and V."""
    hops: Floats
    """[microbatches] From an encoding rank to the first stage's, and back."""
    kept: Floats
    """[ranks, microbatches] Bytes from E to V."""
    working: Floats
    """[ranks, microbatches] Bytes on top while V runs."""
    waiting: Floats
    """[microbatches] Bytes of a part's output, from its E to its F on the first stage's rank; as many of its gradient,
    from B to V."""
    fixed_bytes: Floats
    """[ranks]"""
    step: Floats
    """[ranks] Seconds once an iteration."""


@njit(cache=True)
def play_beside(
    steps: Ints, ranks: int, first: int, waited: bool, stages: tuple[Floats, Floats], parts: tuple[Floats, Floats]
) -> tuple[Floats, Floats, Floats, Floats]:  # pragma: no cover - compiled
    """(start, end) of every action; (last end, work) of every rank.

    Of `stages` seconds [3, stages, microbatches] and transfers [stages, ...], of `parts` seconds [2, ranks, ...] and
    hops [microbatches]. `first` is the first stage's rank, which waits for E only if they are `waited` for.
    """
    of_stages, transfer = stages
    of_parts, hops = parts
    count = steps.shape[1]
    start, end = np.empty(count), np.empty(count)
    clock, busy = np.zeros(ranks), np.zeros(ranks)
    features, gradients = np.zeros(hops.size), np.zeros(hops.size)
    for i in range(count):
        rank, stage, kind, microbatch = steps[0, i], steps[1, i], steps[2, i], steps[3, i]
        begin = clock[rank]
        hop = hops[microbatch] if rank != first else 0.0
        if steps[4, i] >= 0:
            link = stage - 1 if kind == FORWARD else stage
            begin = max(begin, end[steps[4, i]] + transfer[link, microbatch])
        elif kind == FORWARD and stage == 0 and waited:
            begin = max(begin, features[microbatch])
        elif kind == VISION_BACKWARD:
            begin = max(begin, gradients[microbatch] + hop)
        work = of_parts[kind - ENCODE, stage, microbatch] if kind >= ENCODE else of_stages[kind, stage, microbatch]
        start[i] = begin
        end[i] = begin + work
        clock[rank] = begin + work
        busy[rank] += work
        if kind == ENCODE:
            features[microbatch] = max(features[microbatch], end[i] + hop)
        elif kind == BACKWARD and stage == 0:
            gradients[microbatch] = end[i]
    return start, end, clock, busy


@njit(cache=True)
def hold_beside(
    steps: Ints,
    ranks: int,
    first: int,
    of_stages: tuple[Floats, Floats, Floats],
    of_parts: tuple[Floats, Floats, Floats],
) -> tuple[Floats, Floats]:  # pragma: no cover - compiled
    """(peak of every rank, held after every action): as without a tower, and activations from E to V, outputs on the
    first stage's rank from E to F, gradients from that stage's B to V where the microbatch is encoded.

    What is encoded for the next iteration waits to the end, as what is there for this one did before.
    """
    kept, late, transient = of_stages
    encoded, working, waiting = of_parts
    held, peak, after = np.zeros(ranks), np.zeros(ranks), np.empty(steps.shape[1])
    outputs, encodes = np.zeros(waiting.size), np.zeros((ranks, waiting.size), dtype=np.bool_)
    back = (steps[2] == VISION_BACKWARD).any()
    for i in range(steps.shape[1]):
        if steps[2, i] == ENCODE:
            encodes[steps[0, i], steps[3, i]] = back
            if not back:
                outputs[steps[3, i]] += waiting[steps[3, i]]
    held[first] = outputs.sum()
    for i in range(steps.shape[1]):
        rank, stage, kind, microbatch = steps[0, i], steps[1, i], steps[2, i], steps[3, i]
        if kind == FORWARD:
            if stage == 0:
                held[rank] -= outputs[microbatch]
            held[rank] += kept[stage, microbatch]
        elif kind == BACKWARD:
            peak[rank] = max(peak[rank], held[rank] + transient[stage, microbatch])
            held[rank] += late[stage, microbatch] - kept[stage, microbatch]
            if stage == 0:
                for other in range(ranks):
                    held[other] += waiting[microbatch] * encodes[other, microbatch]
                    peak[other] = max(peak[other], held[other])
        elif kind == WEIGHT:
            held[rank] -= late[stage, microbatch]
        elif kind == ENCODE:
            held[rank] += encoded[rank, microbatch]
            held[first] += waiting[microbatch]
            outputs[microbatch] += waiting[microbatch] * back
            peak[first] = max(peak[first], held[first])
        else:
            peak[rank] = max(peak[rank], held[rank] + working[rank, microbatch])
            held[rank] -= encoded[rank, microbatch] + waiting[microbatch]
        peak[rank] = max(peak[rank], held[rank])
        after[i] = held[rank]
    return peak, after
