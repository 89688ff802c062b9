"""Costs of a replicated tower: every rank encodes with all of it, without tensor parallelism.

Every rank of a replica has a working copy of the tower's weights, and fp32 sums of their gradients. Each layer has an
owner, one rank of the replica. Once an iteration sums are reduced to the owners, and copies refreshed from them; owners
take part in the data-parallel reduction and the optimizer step as for other weights.

    copies       2 bytes a parameter (4 in fp32), and 4 for its sum if any of the tower is trained
    a step       bytes of copies and sums divided by the bandwidth between ranks of a replica, not overlapped
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from omnibal_ext.arrays import Floats
from omnibal_ext.chain import RECOMPUTABLE_KINDS, chain_kind, size_of, sizes_of
from omnibal_ext.costs.profile import LayerCost, PackSizes, Profile
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import ENCODED, VISION, Size

SUM_BYTES = 4
"""Bytes of a gradient sum per parameter: fp32."""
Load = Mapping[Size, Floats]
"""Sizes of packs, or of parts of them, that the tower's encoders take: arrays of one shape."""
LAST = {one.size: one.kinds[-1] for one in ENCODED}
"""Size -> the kind of layer whose output is the encoder's."""


@dataclass(frozen=True)
class TowerCosts:
    """Costs of a chain's first `layers`, from a profile at tensor-parallel size 1."""

    profile: Profile
    layers: int
    """Number of the tower's layers."""

    @classmethod
    def of(cls, profile: Profile, layers: int) -> "TowerCosts":
        """Make the costs of the first `layers` from a profile at any tensor-parallel size. Raises UserError if it lacks
        costs of unsharded layers."""
        missing = [kind for kind in profile.cost_kinds[:layers] if kind not in profile.whole_layers]
        if profile.tensor_model_parallel_size == 1:
            return cls(profile, layers)
        if missing:
            raise UserError(
                f"layer {missing[0]}: the profile is of tensor-parallel size {profile.tensor_model_parallel_size}, and "
                "a replicated tower is not sharded: give --tower-profile, of size 1, or plan with --tower cut"
            )
        whole = replace(profile, layers=profile.layers | profile.whole_layers, tensor_model_parallel_size=1)
        return cls(whole, layers)

    @cached_property
    def budgets(self) -> dict[Size, float]:
        """Budget of each size that the tower's encoders take."""
        return {size: float(self.profile.budget(size)) for size in sizes_of(self.kinds)}

    @property
    def rates(self) -> dict[Size, float]:
        """Seconds to encode a tile or frame of each size, as a multiple of the last encoder's, at the budgets."""
        seconds = dict.fromkeys(self.budgets, 0.0)
        for kind in self.kinds:
            seconds[size_of(kind)] += self._cost(kind).forward_seconds + self._cost(kind).backward_seconds
        of_one = {size: seconds[size] / budget for size, budget in self.budgets.items()}
        last = [*of_one.values()][-1]
        return {size: one / last if last else 1.0 for size, one in of_one.items()}

    @property
    def full_pack(self) -> Load:
        """Sizes of a pack that fills all budgets."""
        return {size: np.array(budget) for size, budget in self.budgets.items()}

    def units(self, load: Load) -> Floats:
        """Return about how many images and sounds each pack has, elementwise, at least 1: one rank encodes each of them
        whole."""
        sizes = {one.size: float(one.typical) for one in ENCODED}
        sizes[VISION.size] = self.profile.image_tiles or sizes[VISION.size]
        return np.maximum(1.0, sum(np.round(load[size] / sizes[size]) for size in load))

    def total(self, figure: Callable[[Size], float], load: Load) -> Floats:
        """Return the sum over sizes of `figure` (of one tile or frame) times the load, elementwise."""
        return np.asarray(sum(figure(size) * amount for size, amount in load.items()))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Keys in the profile's `layers`, one for each layer of the tower."""
        return self.profile.cost_kinds[: self.layers]

    @cached_property
    def trained(self) -> bool:
        """Whether the tower has a backward."""
        return self.profile.mode(self.kinds[-1]) != "idle"

    def forward(self, load: Load) -> Floats:
        """Return the forward seconds of all layers of the tower on a load, elementwise."""
        return self._seconds(load, self.kinds, backward=False)

    def backward(self, load: Load, recompute: tuple[int, ...] = ()) -> Floats:
        """Return the backward seconds of all layers on a load, with the layers `recompute` recomputed, elementwise."""
        rerun = tuple(self.kinds[layer] for layer in recompute)
        return self._seconds(load, self.kinds, backward=True) + self._seconds(load, rerun, backward=False)

    def _seconds(self, load: Any, kinds: tuple[str, ...], backward: bool) -> Floats:
        nothing: Any = np.zeros_like(next(iter(load.values())))
        seconds, packs = nothing, PackSizes(load.get(VISION.size, nothing), nothing, nothing, more=load)
        for kind in dict.fromkeys(kinds):
            of_one = (
                self.profile.backward_seconds(kind, packs) if backward else self.profile.forward_seconds(kind, packs)
            )
            seconds = seconds + kinds.count(kind) * np.where(load[size_of(kind)] > 0, of_one, 0.0)
        return seconds

    def kept_bytes(self, size: Size, recompute: tuple[int, ...] = ()) -> float:
        """Return the bytes per tile or frame kept from its E to its V; of the layers `recompute` only the input."""
        if not self.trained:
            return 0.0
        costs = [(layer, self._cost(kind)) for layer, kind in enumerate(self.kinds) if size_of(kind) == size]
        kept = sum(c.recompute_kept_bytes if layer in recompute else c.kept_bytes for layer, c in costs)
        return kept / self.budgets[size]

    def working_bytes(self, size: Size, recompute: tuple[int, ...] = ()) -> float:
        """Return peak extra bytes per tile or frame during V: recomputed activations of the encoder's largest layer."""
        mine = (self.kinds[layer] for layer in recompute if self.trained and size_of(self.kinds[layer]) == size)
        return max((self._cost(kind).saved_bytes for kind in mine), default=0.0) / self.budgets[size]

    def output_bytes(self, size: Size) -> float:
        """Return bytes per tile or frame that the stages get, features included; the gradient has as many."""
        return self._cost(LAST[size]).output_bytes * self.profile.streams(size) / self.budgets[size]

    def transfer_seconds(self, load: Load) -> Floats:
        """Return the seconds in which the output of a load reaches the stages, without latency, elementwise."""
        return self.total(lambda size: self.profile.transfer_seconds_per_byte * self.output_bytes(size), load)

    @property
    def vit_layers(self) -> tuple[int, ...]:
        """Numbers of the tower's layers that can be recomputed: those of all its encoders."""
        return tuple(n for n, kind in enumerate(self.profile.chain[: self.layers]) if kind in RECOMPUTABLE_KINDS)

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """Number of parameters of every layer of the tower. Raises UserError if the profile lacks them."""
        of_kind = self.profile.parameters
        missing = [kind for kind in self.kinds if chain_kind(kind) not in of_kind and kind not in of_kind]
        if missing:
            raise UserError(
                f"layer {missing[0]}: the profile has no parameters, which a tower's copies take; profile again"
            )
        return tuple(of_kind.get(kind, of_kind.get(chain_kind(kind), 0)) for kind in self.kinds)

    @property
    def copy_bytes(self) -> float:
        """Bytes of working copies and gradient sums on a rank."""
        weights = 4 if self.profile.dtype == "fp32" else 2
        return float(sum(self.parameters) * (weights + SUM_BYTES * self.trained))

    @property
    def exchange_seconds(self) -> float:
        """Seconds once an iteration to exchange copies and sums; 0 for a frozen tower, which is copied once a run."""
        seconds_per_byte = self.profile.replica_seconds_per_byte or self.profile.transfer_seconds_per_byte
        return self.copy_bytes * seconds_per_byte * self.trained

    def owner_bytes(self) -> list[float]:
        """Return the bytes of every layer on its owner: weights and, if trained, gradients and optimizer state."""
        return [self._cost(kind).weight_bytes for kind in self.kinds]

    def owner_seconds(self) -> list[float]:
        """Return the seconds of the optimizer step of every layer, on the rank that owns it, once an iteration."""
        return [self._cost(kind).step_seconds for kind in self.kinds]

    def _cost(self, kind: str) -> LayerCost:
        return self.profile.layers[kind]


def rest_profile(profile: Profile, layers: int) -> Profile:
    """Return the profile of the layers that stages hold if the first `layers` are replicated."""
    chain = profile.chain[layers:]
    apart = {kind: numbers for kind, numbers in profile.layers_apart.items() if chain_kind(kind) in chain}
    carried, features = profile.carried_after[-len(chain) :], profile.feature_layers if "vit" in chain else ()
    return replace(profile, chain=chain, layers_apart=apart, feature_layers=features, carried_after=carried)


def language_profile(profile: Profile) -> Profile:
    """Return the profile of the layers from word_embed on."""
    return rest_profile(profile, profile.chain.index("word_embed"))


def owners_by_bytes(sizes: list[float], ranks: int) -> tuple[int, ...]:
    """Return each layer's owning rank, from the layers' bytes: largest first, to the rank with fewest so far."""
    held, owners = [0.0] * ranks, [0] * len(sizes)
    for layer in sorted(range(len(sizes)), key=lambda layer: (-sizes[layer], layer)):
        owners[layer] = min(range(ranks), key=lambda rank: (held[rank], rank))
        held[owners[layer]] += sizes[layer]
    return tuple(owners)
