"""Costs of every kind of layer on every microbatch, as tables that a layout's figures are sums of.

A stage is a row of counts, `COLUMNS` of them: its layers of each kind; then the features that it receives, of which one
beside the output of a layer takes as many bytes as that output until its backward; and those of its ViT layers that see
whole images where the others see windows: what such a layer takes longer.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.chain import FULL, KINDS
from omnibal_ext.costs.profile import LayerCost, PackSizes, Profile

Floats = NDArray[np.float64]


FULL_COLUMN = 2 * len(KINDS)
COLUMNS = FULL_COLUMN + 1
_VIT = KINDS.index("vit")


@dataclass(frozen=True, slots=True)
class KindTables:
    """Costs by column (kinds in the order of `KINDS`): seconds float64 [columns, cases, microbatches], bytes
    float64 [columns]."""

    forward: Floats
    backward: Floats
    recompute: Floats
    weight: Floats
    transfer: Floats
    load: Floats
    """Units over the budget, [columns, cases, microbatches]."""
    kept: Floats
    recompute_kept: Floats
    late: Floats
    """Between B and W where the schedule splits the backward."""
    recompute_late: Floats
    fixed: Floats
    step: Floats


def prefix_sums(per_layer: NDArray) -> NDArray:
    """[layers, ...] -> [layers + 1, ...]: the sums before each layer, and of all."""
    return np.concatenate([np.zeros_like(per_layer[:1]), np.cumsum(per_layer, axis=0)])


def kind_tables(profile: Profile, packs: PackSizes | None, microbatches: int, split_backward: bool) -> KindTables:
    """The tables for packs int64 [iterations, data-parallel ranks, microbatches]; without, all fill both budgets."""
    rows = [_row(profile, packs, microbatches, split_backward, kind) for kind in KINDS]
    rows += [_received(profile, row, kind) for row, kind in zip(rows, KINDS, strict=True)]
    full = _row(profile, packs, microbatches, split_backward, FULL) if profile.full_layers else rows[_VIT]
    rows[_VIT], longer = _apart(rows[_VIT], full, len(profile.full_layers) / max(1, profile.chain.count("vit")))
    rows.append(longer)
    return KindTables(*(np.ascontiguousarray(np.stack(column)) for column in zip(*rows, strict=True)))


def _row(
    profile: Profile, packs: PackSizes | None, microbatches: int, split_backward: bool, kind: str
) -> tuple[Floats, ...]:
    shape = (1 if packs is None else packs.tiles.shape[0] * packs.tiles.shape[1], microbatches)
    if kind not in profile.layers:
        return (*[np.zeros(shape)] * 6, *[np.zeros(())] * 6)
    cost = profile.layers[kind]
    if packs is None:
        load = np.ones(shape)
        forward, backward = load * cost.forward_seconds, load * cost.backward_seconds
    else:
        load = profile.load_factor(kind, packs).reshape(shape)
        forward = profile.forward_seconds(kind, packs).reshape(shape)
        backward = profile.backward_seconds(kind, packs).reshape(shape)
    whole, share = cost.backward_seconds, 0.5
    if split_backward and cost.split_backward_seconds is not None and whole:
        backward, whole = backward * (cost.split_backward_seconds / whole), cost.split_backward_seconds
    if cost.weight_gradient_seconds is not None:
        share = cost.weight_gradient_seconds / max(whole, cost.weight_gradient_seconds, 1e-300)
    weight = backward * (share if profile.mode(kind) == "trained" else 0.0)
    transfer = profile.transfer_latency_seconds + profile.transfer_seconds_per_byte * cost.output_bytes * load
    recompute = forward * (cost.extra_seconds / cost.forward_seconds)
    return forward, backward, recompute, weight, transfer, load, *map(np.asarray, _bytes(cost))


def _apart(vit: tuple[Floats, ...], full: tuple[Floats, ...], share: float) -> tuple[tuple[Floats, ...], ...]:
    """The row of a ViT layer, and of what one of the `share` of them that is `full` takes longer; running one again
    takes the mean of both, for counts of recomputed layers do not tell them apart."""
    more = [f - v for f, v in zip(full, vit, strict=True)]
    forward, backward, recompute, weight, *others = vit
    row = (forward, backward, recompute + share * more[2], weight, *others)
    return row, (more[0], more[1], np.zeros_like(forward), more[3], *map(np.zeros_like, others))


def _received(profile: Profile, row: tuple[Floats, ...], kind: str) -> tuple[Floats, ...]:
    """A feature received beside the output of a kind, whose own row is given."""
    nothing, load = np.zeros_like(row[0]), row[5]
    held = profile.layers[kind].output_bytes if kind in profile.layers else 0.0
    return (*[nothing] * 5, load, *map(np.asarray, (held, held, 0.0, 0.0, 0.0, 0.0)))


def _bytes(cost: LayerCost) -> tuple[float, ...]:
    # Keeping more than the whole layer would make recomputing a loss of memory; nothing here plans that.
    recompute_kept = min(cost.recompute_kept_bytes, cost.kept_bytes)
    late = (cost.kept_bytes, recompute_kept) if cost.late_bytes is None else (cost.late_bytes, cost.late_bytes)
    return cost.kept_bytes, recompute_kept, *late, cost.weight_bytes, cost.step_seconds
