"""Recompute counts of a one-stage rank that no other count beats in every kind of layer; compiled, for `joint.py`.

In one kind, all levels take the same share of a forward on every microbatch, so its counts have one order in time:

    recomputed of the ViT layers    nothing   1 cheap   2 cheap   1 whole   1 whole, 1 cheap   ...
    least of the LLM layers         no fit    3 whole   3 whole   1 cheap   nothing
    worth looking at                                             *
                                              *                             *
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numba.extending import register_jitable
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints

ROUNDING = 1e-9
_MOST_TOGETHER = 4096
"""Limit of counts of the last encoder's layers times those of the others; above it some of the others are left out."""


class StageBytes(NamedTuple):
    """What decides whether a rank with one stage fits its memory: bytes of one layer by column of `tables` or by
    recompute option, and how many microbatches are held."""

    fixed: Floats
    kept: Floats
    late: Floats
    saved: Floats
    saved_late: Floats
    between: Ints
    """[vectors, 2] Microbatches held between actions: before the end of their B, and between B and W."""
    in_backward: Ints
    """[vectors, 2] Microbatches held while a B runs, in the two states of `between`."""
    of_option: Ints
    backward: Ints
    pairs: Ints
    """See `tables.Columns`, as for the two above."""
    room: float
    split_backward: bool


@register_jitable
def on_top(
    held: Any, recomputed: Any, kept: Floats, saved: Floats, of_option: Ints, backward: Ints, split_backward: bool
) -> Any:
    """Return the most bytes that recomputing in a stage's backward takes on top of those held, from counts of its
    layers [columns, ...] and of those recomputed [options, ...].

    In each kind those recomputed whole come first in the stage, then those recomputed cheaply; and what comes behind a
    layer is freed when it is recomputed (zero-bubble lists keep it for W). Cheap outputs are taken to be there all at
    once, which is a little more than there is.
    """
    after = 0.0 * recomputed[0]
    most = after
    for kind in backward:
        after = after + held[kind] * kept[kind]
        for option in range(len(recomputed)):
            if of_option[option] == kind:
                after = after - recomputed[option] * kept[kind]
        for option in range(len(recomputed)):
            if of_option[option] == kind:
                most = np.maximum(most, (saved[option] - after * (not split_backward)) * (recomputed[option] > 0))
                after = after + recomputed[option] * (kept[kind] - saved[option])
    return most


@njit(cache=True)
def fits(stage: StageBytes, held: Ints, recomputed: Ints) -> bool:  # pragma: no cover - compiled
    """Return whether a stage with layers [columns] and recomputed ones [options] fits, as by `bytes_of_counts`."""
    fixed, kept, late = _nothing_recomputed(stage, held)
    for option in range(recomputed.size):
        kept -= recomputed[option] * stage.saved[option]
        late -= recomputed[option] * stage.saved_late[option]
    kinds = (stage.of_option, stage.backward)
    most, transient = 0.0, on_top(held, recomputed, stage.kept, stage.saved, *kinds, stage.split_backward)
    for early, later in stage.between:
        most = max(most, early * kept + later * late)
    for early, later in stage.in_backward:
        most = max(most, early * kept + later * late + transient)
    return fixed + most <= stage.room


@njit(cache=True)
def _nothing_recomputed(stage: StageBytes, held: Ints) -> tuple[float, float, float]:  # pragma: no cover - compiled
    """Return a stage's bytes if nothing is recomputed: weights; a microbatch's kept from F to B, and from B to W."""
    fixed, kept, late = 0.0, 0.0, 0.0
    for column in range(held.size):
        fixed += held[column] * stage.fixed[column]
        kept += held[column] * stage.kept[column]
        late += held[column] * stage.late[column]
    return fixed, kept, late


@njit(cache=True)
def minimal(stage: StageBytes, held: Ints, seconds: Floats, offered: NDArray[np.bool_]) -> Ints:  # pragma: no cover
    """Return recompute counts with which a stage fits, int64 [found, options]: all that none beats in every kind.

    1. Sort all counts of each kind by time; `seconds` [options] are those to recompute one layer.
    2. For each combination of the encoders' counts take the LLM's fastest that fits, unless one as fast was found for
       encoders that take no longer. Skip LLM counts that would free too little even if recomputing took no bytes. Of
       very many combinations some are left out.
    """
    of_llm, of_vit = stage.pairs[0], stage.pairs[1]
    llm = _in_time(held[stage.of_option[of_llm[0]]], seconds[of_llm], offered[of_llm])
    vit = _in_time(held[stage.of_option[of_vit[0]]], seconds[of_vit], offered[of_vit])
    others = _of_others(stage, held, seconds, offered)
    others = others[:: 1 + len(others) * len(vit) // _MOST_TOGETHER] if len(vit) > 1 else others
    most_saved, nothing_saved = _most_saved(stage, llm, of_llm), _missing(stage, held)
    found, least, options = [], np.full(len(vit), np.inf), np.arange(seconds.size)
    for k in range(len(others)):
        recomputed, missing, limit = others[k].copy(), nothing_saved.copy(), np.inf
        if k and _is_less_of_some(stage, others[k], others[k - 1], seconds):
            least[:] = np.inf
        if least[0] == 0:
            continue
        for moment in range(len(missing)):
            missing[moment] -= _saved(stage, moment, recomputed, options)
        for i in range(len(vit)):
            recomputed[of_vit] = vit[i]
            limit = min(limit, least[i])
            first = 0
            for moment in range(len(missing)):
                need = missing[moment] - _saved(stage, moment, vit[i], of_vit)
                first = max(first, np.searchsorted(most_saved[moment], need))
            for j in range(first, len(llm)):
                taken = llm[j, 0] * seconds[of_llm[0]] + llm[j, 1] * seconds[of_llm[1]]
                if taken >= limit:
                    break
                recomputed[of_llm] = llm[j]
                if fits(stage, held, recomputed):
                    found.append(recomputed.copy())
                    limit = taken
                    break
            least[i] = limit
    out = np.empty((len(found), seconds.size), dtype=np.int64)
    for i in range(len(found)):
        out[i] = found[i]
    return out


@njit(cache=True)
def _of_others(
    stage: StageBytes, held: Ints, seconds: Floats, offered: NDArray[np.bool_]
) -> Ints:  # pragma: no cover - compiled
    """Return all combinations of recompute counts of the encoders but the chain's last, int64 [combinations, options];
    of each encoder the fastest counts first."""
    found = np.zeros((1, seconds.size), dtype=np.int64)
    for number in range(2, len(stage.pairs)):
        of_kind = stage.pairs[number]
        layers = held[stage.of_option[of_kind[0]]]
        if layers:
            own = _in_time(layers, seconds[of_kind], offered[of_kind])
            together = np.empty((len(found) * len(own), seconds.size), dtype=np.int64)
            for i in range(len(together)):
                together[i] = found[i // len(own)]
                together[i][of_kind] = own[i % len(own)]
            found = together
    return found


@njit(cache=True)
def _is_less_of_some(
    stage: StageBytes, counts: Ints, others: Ints, seconds: Floats
) -> bool:  # pragma: no cover - compiled
    """Return whether recompute counts [options] take less time than `others` in some encoder but the chain's last."""
    for number in range(2, len(stage.pairs)):
        cheap, whole = stage.pairs[number]
        more = (counts[cheap] - others[cheap]) * seconds[cheap] + (counts[whole] - others[whole]) * seconds[whole]
        if more < -ROUNDING * seconds[whole]:
            return True
    return False


@njit(cache=True)
def _missing(stage: StageBytes, held: Ints) -> Floats:  # pragma: no cover - compiled
    """Return bytes over a stage's room with nothing recomputed, less rounding, for each row of `between`: [vectors]."""
    fixed, kept, late = _nothing_recomputed(stage, held)
    slack = ROUNDING * (fixed + kept + late)
    return stage.between[:, 0] * kept + stage.between[:, 1] * late + fixed - stage.room - slack


@njit(cache=True)
def _saved(stage: StageBytes, moment: int, counts: Ints, options: Ints) -> float:  # pragma: no cover - compiled
    """Return the bytes that recomputing saves at row `moment` of `between`: `counts` layers by each of `options`."""
    early, later, saved = stage.between[moment, 0], stage.between[moment, 1], 0.0
    for index in range(options.size):
        saved += counts[index] * (early * stage.saved[options[index]] + later * stage.saved_late[options[index]])
    return saved


@njit(cache=True)
def _most_saved(stage: StageBytes, counts: Ints, options: Ints) -> Floats:  # pragma: no cover - compiled
    """Return the most bytes that counts 0 .. i save at each row of `between`, for each i: [vectors, counts]."""
    most = np.zeros((len(stage.between), len(counts)))
    for moment in range(len(stage.between)):
        for i in range(len(counts)):
            saved = _saved(stage, moment, counts[i], options)
            most[moment, i] = max(saved, most[moment, i - 1]) if i else saved
    return most


@njit(cache=True)
def _in_time(layers: int, seconds: Floats, offered: NDArray[np.bool_]) -> Ints:  # pragma: no cover - compiled
    """Return all pairs (cheap, whole) of recomputed layers out of `layers`, int64 [counts, 2], fastest first."""
    most = layers if offered[0] else 0
    counts = np.empty(((most + 1) * (layers + 1), 2), dtype=np.int64)
    taken, number = np.empty(len(counts)), 0
    for whole in range(layers + 1):
        for cheap in range(min(most, layers - whole) + 1):
            counts[number, 0], counts[number, 1] = cheap, whole
            taken[number] = cheap * seconds[0] + whole * seconds[1]
            number += 1
    return counts[:number][np.argsort(taken[:number], kind="mergesort")]
