"""Tables of the costs of every kind of layer on every microbatch; a layout's figures are sums of their rows.

A stage is a row of counts (`columns_of`): its layers of each kind; then the features that it receives together with the
output of a layer, each of which takes as many bytes as that output until its backward; and its layers that differ from
the first of their kind (`Profile.layers_apart`), whose column has what such a layer takes more, or less.

What a stage recomputes is a row of counts too, one for each of `Columns.options`: a level and a kind of layer.

    kept < cheap (outputs of norms and of the activation function) < whole (everything but the layer's input)
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain as joined
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.chain import KINDS, chain_kind, modality_of
from omnibal_ext.costs.profile import LayerCost, PackSizes, Profile
from omnibal_ext.modalities.modality import MODALITIES

LEVELS = ("cheap", "whole")


@dataclass(frozen=True)
class Columns:
    """Kinds of layers, and options to recompute them, by their column in a profile's tables."""

    kinds: tuple[str, ...]
    """Kinds by column: of all modalities up to the last one that is in the chain, or whose tokens pass through it."""
    options: tuple[tuple[str, str], ...]
    """(level, kind) of what can be recomputed."""

    @classmethod
    def of(cls, profile: Profile) -> "Columns":
        """Return the kinds of layers, and options to recompute them, of a profile's chain."""
        there = {modality_of(kind) for kind in (*profile.chain, *profile.tokens_after)}
        kinds = [one.kinds for one in MODALITIES[: 1 + max(map(MODALITIES.index, there))]]
        layers = [layer for _, layer, _ in kinds]
        return cls(tuple(joined.from_iterable(kinds)), (*product(LEVELS, layers[:2]), *product(LEVELS, layers[2:])))

    @cached_property
    def of_option(self) -> Ints:
        """[options] Index in `kinds` of the kind that an option recomputes."""
        return np.array([self.kinds.index(kind) for _, kind in self.options])

    @cached_property
    def whole(self) -> NDArray[np.bool_]:
        """[options] Whether an option recomputes whole layers."""
        return np.array([level == "whole" for level, _ in self.options])

    @cached_property
    def backward(self) -> Ints:
        """[kinds] Indices of `kinds` in the order of a backward: the chain's last kind first."""
        return np.array([self.kinds.index(kind) for kind in reversed(KINDS) if kind in self.kinds])

    @cached_property
    def pairs(self) -> Ints:
        """[kinds that are recomputed, 2] Indices in `options` of cheap and of whole recomputation of each kind: first
        the language model's, then the encoders', the chain's last encoder first."""
        kinds = sorted({kind for _, kind in self.options}, key=KINDS.index, reverse=True)
        return np.array([[self.options.index((level, kind)) for level in LEVELS] for kind in kinds])


@dataclass(frozen=True, slots=True)
class KindTables:
    """Costs of one layer by column (`columns_of`): seconds float64 [columns, cases, microbatches], bytes float64
    [columns]; what recomputing costs and saves by option, [options, ...]."""

    forward: Floats
    backward: Floats
    weight: Floats
    transfer: Floats
    load: Floats
    """Units over the budget, [columns, cases, microbatches]."""
    kept: Floats
    late: Floats
    """Bytes between B and W where the schedule splits the backward."""
    fixed: Floats
    step: Floats
    host_forward: Floats
    """Seconds in which a host launches a layer, [columns]."""
    host_backward: Floats
    recompute: Floats
    """Seconds; in one kind, all levels are the same share of a forward on every microbatch."""
    saved: Floats
    """Kept bytes that a recomputed layer frees."""
    saved_late: Floats
    offered: NDArray[np.bool_]
    """[options] Whether the profile has figures of an option; whole layers always."""


def columns_of(profile: Profile) -> tuple[str, ...]:
    """Return the kind of layer to which each column of the tables belongs: all kinds; all again, for features as large
    as their outputs; then layers that differ from the first of their kind."""
    kinds = Columns.of(profile).kinds
    return (*kinds, *kinds, *map(chain_kind, profile.layers_apart))


def prefix_sums(per_layer: NDArray) -> NDArray:
    """Return sums over all layers before each layer, and over all: [layers, ...] -> [layers + 1, ...]."""
    return np.concatenate([np.zeros_like(per_layer[:1]), np.cumsum(per_layer, axis=0)])


def kind_tables(profile: Profile, packs: PackSizes | None, microbatches: int, split_backward: bool) -> KindTables:
    """Build the tables for packs [iterations, data-parallel ranks, microbatches]; None: all fill the budgets."""
    profile, columns = _alike(_uncompiled(profile) if split_backward else profile), Columns.of(profile)
    kinds = columns.kinds
    rows = [_row(profile, packs, microbatches, split_backward, kind) for kind in kinds]
    rows += [_received(profile, row, kind) for row, kind in zip(rows, kinds, strict=True)]
    plain = dict(zip(kinds, rows, strict=False))
    for name in profile.layers_apart:
        row, column = plain[chain_kind(name)], kinds.index(chain_kind(name))
        share = len(profile.layers_apart[name]) / max(1, profile.chain.count(chain_kind(name)))
        extra, more = _apart(row, _row(profile, packs, microbatches, split_backward, name), share)
        rows[column] = (*rows[column][:-1], rows[column][-1] + extra)
        rows.append(more)
    *by_column, whole = (np.ascontiguousarray(np.stack(column)) for column in zip(*rows, strict=True))
    options = [_option(profile.layers.get(kind), level) for level, kind in columns.options]
    shares, saved, saved_late, offered = (np.array(values) for values in zip(*options, strict=True))
    recompute = whole[columns.of_option] * shares[:, None, None]
    figures: list[Any] = [*by_column, recompute, saved, saved_late, offered]
    return KindTables(*figures)


def _uncompiled(profile: Profile) -> Profile:
    return replace(profile, layers={kind: cost.uncompiled for kind, cost in profile.layers.items()})


def _alike(profile: Profile) -> Profile:
    """Return the profile with the bytes of all kinds of language layers raised to the largest of them: recompute counts
    do not tell them apart, and no plan may promise too little."""
    kinds = ("llm", *(kind for kind in profile.layers_apart if chain_kind(kind) == "llm"))
    pair = {kind: profile.layers[kind] for kind in kinds if kind in profile.layers}
    names = ("kept_bytes", "recompute_kept_bytes", "late_bytes", "recompute_cheap_kept_bytes")
    most = {name: [value for cost in pair.values() if (value := getattr(cost, name)) is not None] for name in names}
    alike = {name: max(values) for name, values in most.items() if len(values) == len(pair)}
    return replace(profile, layers=profile.layers | {kind: replace(cost, **alike) for kind, cost in pair.items()})


def _option(cost: LayerCost | None, level: str) -> tuple[float, float, float, bool]:
    """Return what recomputing a layer at `level` ("cheap", "whole") costs and saves: seconds, as a share of those of
    the whole layer; bytes saved until B, and from B to W; whether planners may choose it."""
    if cost is None:
        return 0.0, 0.0, 0.0, level == "whole"
    at_once = cost.late_bytes is None
    if level == "whole":
        return 1.0, cost.saved_bytes, cost.saved_bytes * at_once, True
    seconds, kept = cost.recompute_cheap_seconds, cost.recompute_cheap_kept_bytes
    if seconds is None or kept is None or kept >= cost.kept_bytes:
        return 0.0, 0.0, 0.0, False
    saved = cost.kept_bytes - kept
    return seconds / cost.extra_seconds if cost.extra_seconds else 0.0, saved, saved * at_once, True


def _row(
    profile: Profile, packs: PackSizes | None, microbatches: int, split_backward: bool, kind: str
) -> tuple[Floats, ...]:
    """Return one kind's figures for the fields of `KindTables` up to `host_backward`, and its seconds to recompute a
    whole layer, [cases, microbatches] or a number each; zeros if the profile lacks the kind."""
    shape = (1 if packs is None else packs.tiles.shape[0] * packs.tiles.shape[1], microbatches)
    if kind not in profile.layers:
        return (*[np.zeros(shape)] * 5, *[np.zeros(())] * 6, np.zeros(shape))
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
    if packs is not None:
        exchange = profile.exchange_seconds(kind, packs).reshape(shape)
        forward, backward = forward + exchange, backward + exchange * (profile.mode(kind) != "idle")
    transfer = profile.transfer_latency_seconds + profile.transfer_seconds_per_byte * cost.output_bytes * load
    recompute = forward * (cost.extra_seconds / cost.forward_seconds)
    late = cost.kept_bytes if cost.late_bytes is None else cost.late_bytes
    host = cost.host_forward_seconds, cost.host_backward_seconds
    once = map(np.asarray, (cost.kept_bytes, late, cost.weight_bytes, cost.step_seconds, *host))
    return forward, backward, weight, transfer, load, *once, recompute


def _apart(plain: tuple[Floats, ...], apart: tuple[Floats, ...], share: float) -> tuple[Floats, tuple[Floats, ...]]:
    """Compare two rows of `_row`, of a kind's usual layers (`plain`) and of those that differ (`apart`, a `share` of
    all): return the seconds to add to recomputing any layer of the kind, and a row of what a differing one takes more.

    Recomputing takes the mean of all, for counts of recomputed layers do not tell them apart.
    """
    more = [other - one for other, one in zip(apart, plain, strict=True)]
    alike = map(np.zeros_like, plain[3:7])  # transfers, loads, bytes kept and late
    return share * more[-1], (*more[:3], *alike, *more[7:-1], np.zeros_like(more[-1]))


def _received(profile: Profile, row: tuple[Floats, ...], kind: str) -> tuple[Floats, ...]:
    """Return the row (as of `_row`) of a feature, an extra tensor that a stage receives with the output of a layer of
    this kind, whose row is `row`: bytes kept as of that output, no seconds."""
    nothing, load = np.zeros_like(row[0]), row[4]
    held = profile.layers[kind].output_bytes if kind in profile.layers else 0.0
    return (*[nothing] * 4, load, *map(np.asarray, (held, *[0.0] * 5)), nothing)
