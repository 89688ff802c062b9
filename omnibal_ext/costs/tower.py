"""Costs of a replicated vision tower: every rank encodes with all of it, without tensor parallelism.

Every rank of a replica has a working copy of the tower's weights, and fp32 sums of their gradients. Each link has an
owner, one rank of the replica. Once an iteration sums are reduced to the owners, and copies refreshed from them; owners
take part in the data-parallel reduction and the optimizer step as for other weights.

    copies       2 bytes a parameter (4 in fp32), and 4 for its sum if any of the tower is trained
    a step       bytes of copies and sums divided by the bandwidth between ranks of a replica, not overlapped
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from omnibal_ext.arrays import Floats
from omnibal_ext.chain import RECOMPUTABLE_KINDS, chain_kind
from omnibal_ext.costs.profile import LayerCost, PackSizes, Profile
from omnibal_ext.errors import UserError

SUM_BYTES = 4
"""Per parameter, in fp32."""


@dataclass(frozen=True)
class TowerCosts:
    """Costs of the chain's links before word_embed, from a profile at tensor-parallel size 1."""

    profile: Profile

    @classmethod
    def of(cls, profile: Profile) -> "TowerCosts":
        """From a profile at any tensor-parallel size. Raises UserError if it lacks costs of unsharded layers."""
        links = profile.cost_kinds[: profile.chain.index("word_embed")]
        missing = [kind for kind in links if kind not in profile.whole_layers]
        if profile.tensor_model_parallel_size == 1:
            return cls(profile)
        if missing:
            raise UserError(
                f"layer {missing[0]}: the profile is of tensor-parallel size {profile.tensor_model_parallel_size}, and "
                "a replicated tower is not sharded: give --tower-profile, of size 1, or plan with --tower cut"
            )
        return cls(replace(profile, layers=profile.layers | profile.whole_layers, tensor_model_parallel_size=1))

    @property
    def unit(self) -> float:
        """About how many tiles an image has; an image is encoded in one piece."""
        return self.profile.image_tiles or 1.0

    @property
    def links(self) -> int:
        """Number of the tower's links."""
        return self.profile.chain.index("word_embed")

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Keys of its links' costs in the profile's `layers`."""
        return self.profile.cost_kinds[: self.links]

    @cached_property
    def trained(self) -> bool:
        """Whether it has a backward pass."""
        return self.profile.mode("projector") != "idle"

    def forward(self, tiles: Floats) -> Floats:
        """Return the forward seconds of all links, elementwise for `tiles`."""
        return self._seconds(tiles, self.kinds, backward=False)

    def backward(self, tiles: Floats, recompute: tuple[int, ...] = ()) -> Floats:
        """Return backward seconds with recomputation of the links `recompute`."""
        rerun = tuple(self.kinds[link] for link in recompute)
        return self._seconds(tiles, self.kinds, backward=True) + self._seconds(tiles, rerun, backward=False)

    def _seconds(self, tiles: Any, kinds: tuple[str, ...], backward: bool) -> Floats:
        nothing: Any = np.zeros_like(tiles)
        seconds, packs = nothing, PackSizes(tiles, nothing, nothing)
        for kind in dict.fromkeys(kinds):
            of_one = (
                self.profile.backward_seconds(kind, packs) if backward else self.profile.forward_seconds(kind, packs)
            )
            seconds = seconds + kinds.count(kind) * np.where(tiles > 0, of_one, 0.0)
        return seconds

    def kept_bytes(self, recompute: tuple[int, ...] = ()) -> float:
        """Bytes kept per tile between its forward (E) and backward (V); arguments as of `backward`."""
        if not self.trained:
            return 0.0
        costs = [self._cost(kind) for kind in self.kinds]
        kept = sum(c.recompute_kept_bytes if link in recompute else c.kept_bytes for link, c in enumerate(costs))
        return kept / self.profile.vit_budget

    def working_bytes(self, recompute: tuple[int, ...] = ()) -> float:
        """More bytes per tile during V: recomputed activations of the largest link."""
        saved = (self._cost(self.kinds[link]).saved_bytes for link in recompute if self.trained)
        return max(saved, default=0.0) / self.profile.vit_budget

    @property
    def output_bytes(self) -> float:
        """Bytes per tile that the language model gets, features included; the gradient has as many."""
        streams = 1 + self.profile.features_after[self.links - 1]
        return self._cost("projector").output_bytes * streams / self.profile.vit_budget

    @property
    def vit_links(self) -> tuple[int, ...]:
        """Numbers of the links that can be recomputed."""
        return tuple(n for n, kind in enumerate(self.profile.chain[: self.links]) if kind in RECOMPUTABLE_KINDS)

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """Parameters of every link. Raises UserError if the profile has none."""
        of_kind = self.profile.parameters
        missing = [kind for kind in self.kinds if chain_kind(kind) not in of_kind and kind not in of_kind]
        if missing:
            raise UserError(
                f"layer {missing[0]}: the profile has no parameters, which a tower's copies take; profile again"
            )
        return tuple(of_kind.get(kind, of_kind.get(chain_kind(kind), 0)) for kind in self.kinds)

    @property
    def copy_bytes(self) -> float:
        """Bytes on a rank of working copies and gradient sums."""
        weights = 4 if self.profile.dtype == "fp32" else 2
        return float(sum(self.parameters) * (weights + SUM_BYTES * self.trained))

    @property
    def exchange_seconds(self) -> float:
        """Of the step, once an iteration; 0 for a frozen tower, which is copied once a run."""
        seconds_per_byte = self.profile.replica_seconds_per_byte or self.profile.transfer_seconds_per_byte
        return self.copy_bytes * seconds_per_byte * self.trained

    def owner_bytes(self) -> list[float]:
        """Bytes of every link on its owner: weights and, if trained, gradients and optimizer state."""
        return [self._cost(kind).weight_bytes for kind in self.kinds]

    def owner_seconds(self) -> list[float]:
        """Step seconds of every link on its owner, once an iteration."""
        return [self._cost(kind).step_seconds for kind in self.kinds]

    def _cost(self, kind: str) -> LayerCost:
        return self.profile.layers[kind]


def language_profile(profile: Profile) -> Profile:
    """Return the profile of the links that stages hold if the tower is replicated: from word_embed on."""
    chain = profile.chain[profile.chain.index("word_embed") :]
    apart = {kind: layers for kind, layers in profile.layers_apart.items() if chain_kind(kind) in chain}
    carried = profile.carried_after[-len(chain) :]
    return replace(profile, chain=chain, layers_apart=apart, feature_layers=(), carried_after=carried)


def owners_by_bytes(sizes: list[float], ranks: int) -> tuple[int, ...]:
    """Return the owner of every link, from the bytes of each: largest first, to the rank with fewest bytes so far."""
    held, owners = [0.0] * ranks, [0] * len(sizes)
    for link in sorted(range(len(sizes)), key=lambda link: (-sizes[link], link)):
        owners[link] = min(range(ranks), key=lambda rank: (held[rank], rank))
        held[owners[link]] += sizes[link]
    return tuple(owners)
