"""A replicated tower in a layout problem: seconds of its E and V on every microbatch, and its bytes.

The images and sounds of a pack are divided among the pipeline ranks that encode it and their tensor ranks. The planner
does not know their sizes: it takes them to be alike (`TowerCosts.units`), and every rank to take as long as the one
that gets most.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.costs.tower import Load, TowerCosts
from omnibal_ext.plan_tower import Tower
from omnibal_ext.schedules.simulate import Encoding

Phase = Literal["forward", "backward", "recompute"]


@dataclass(frozen=True)
class TowerBeside:
    """A plan's replicated tower, and what it costs on a problem's packs."""

    tower: Tower
    costs: TowerCosts
    profile: Profile
    """Profile of the whole chain, tower included."""
    ranks: int
    """Number of pipeline ranks."""
    packs: PackSizes | None
    """[iterations, data-parallel ranks, microbatches]; None: every microbatch fills the budget."""

    @cached_property
    def whole(self) -> Load:
        """Sizes (tiles, frames) of whole packs: float64 [cases, microbatches] each; a case is a rank's iteration."""
        count, packs = len(self.tower.encoding_ranks), self.packs
        if packs is None:
            return {size: np.full((1, count), budget) for size, budget in self.costs.budgets.items()}
        return {size: packs.of(size).reshape(-1, count).astype(np.float64) for size in self.costs.budgets}

    @property
    def tensor(self) -> int:
        """Number of tensor-parallel ranks."""
        return self.profile.tensor_model_parallel_size

    @cached_property
    def encodes(self) -> NDArray[np.bool_]:
        """bool [ranks, microbatches]: which pipeline ranks encode a share of which microbatches."""
        found = np.zeros((self.ranks, len(self.tower.encoding_ranks)), dtype=np.bool_)
        for microbatch, ranks in enumerate(self.tower.encoding_ranks):
            found[list(ranks), microbatch] = True
        return found

    @cached_property
    def loads(self) -> Load:
        """Sizes (tiles, frames) of the largest share that a tensor rank gets of each pack: as `whole`."""
        return largest_share(self.costs, self.whole, self.encodes.sum(axis=0) * self.tensor)

    @cached_property
    def is_needed(self) -> NDArray[np.bool_]:
        """bool [cases, microbatches]: whether a pack has anything to encode."""
        return np.any([load > 0 for load in self.loads.values()], axis=0)

    @cached_property
    def seconds(self) -> Floats:
        """Return seconds of the tower's forward and backward (E, V): float64 [2, cases, pipeline ranks, microbatches].

        A case is an iteration of one data-parallel rank. 0 where a rank encodes nothing.
        """
        found = part_seconds(self.costs, self.loads, self.tower)
        action = self.profile.action_seconds * self.is_needed
        return np.asarray((found + action)[:, :, None] * self.encodes)

    @cached_property
    def hops(self) -> Floats:
        """Seconds to carry one encoding rank's output to the first stage: float64 [cases, microbatches]."""
        profile = self.profile
        seconds = profile.transfer_latency_seconds + self.costs.transfer_seconds(self.loads)
        return np.asarray(np.where(self.is_needed, seconds, 0.0))

    @cached_property
    def fixed_bytes(self) -> Floats:
        """float64 [ranks]: bytes of the tower that stay on a pipeline rank: copies of all its weights and sums of their
        gradients; and weights, gradients and optimizer state of the layers it owns."""
        return self._most_owned(self.costs.owner_bytes()) + self.costs.copy_bytes

    @cached_property
    def step(self) -> Floats:
        """float64 [ranks]: seconds once an iteration, to update owned layers and exchange weights and gradients."""
        return self._most_owned(self.costs.owner_seconds()) + self.costs.exchange_seconds

    def _most_owned(self, of_layers: list[float]) -> Floats:
        """Sum a figure over the layers that each rank owns; return the most of a pipeline rank's: float64 [ranks]."""
        owned = np.bincount(self.tower.owners, of_layers, self.ranks * self.tensor)
        return np.asarray(owned.reshape(self.ranks, self.tensor).max(axis=1), dtype=np.float64)

    def encoding(self, case: int) -> Encoding:
        """Return seconds and bytes of the tower in one case (a data-parallel rank's iteration), for `simulate`."""
        loads = {size: load[case] for size, load in self.loads.items()}
        kept, working = (
            self.costs.total(partial(of_unit, recompute=self.tower.recompute), loads) * self.encodes
            for of_unit in (self.costs.kept_bytes, self.costs.working_bytes)
        )
        waiting = self.costs.total(self.costs.output_bytes, loads)
        return Encoding(self.seconds[:, case], self.hops[case], kept, working, waiting, self.fixed_bytes, self.step)

    def pieces(self, kind: str, case: int, microbatch: int) -> list[tuple[str, Phase, float]]:
        """Return (part of the model, phase, seconds) of one E or V (`kind`); "other" is the executor's own time."""
        load = {size: load[case, microbatch] for size, load in self.loads.items()}
        executor = self.profile.action_seconds * float(self.is_needed[case, microbatch])
        other: tuple[str, Phase, float] = ("other", "forward" if kind == "E" else "backward", executor)
        if kind == "E":
            return [other, ("vit", "forward", float(self.costs.forward(load)))]
        plain = float(self.costs.backward(load))
        recompute = float(self.costs.backward(load, self.tower.recompute)) - plain
        return [other, ("vit", "recompute", recompute), ("vit", "backward", plain)]

    def mean_seconds(self) -> list[float]:
        """Return the mean seconds of an E, and of a V, over ranks, microbatches and cases that have one."""
        count = max(1, int(self.encodes.sum())) * len(self.is_needed)
        return [float(seconds.sum() / count) for seconds in self.seconds]

    def work_seconds(self) -> float:
        """Return the mean seconds of one rank that encodes an iteration's packs alone, forward and backward."""
        seconds = self.costs.forward(self.whole) + self.costs.backward(self.whole) * self.costs.trained
        return float(seconds.sum(axis=1).mean() / self.tensor)


def largest_share(costs: TowerCosts, load: Load, workers: Ints | int) -> Load:
    """Return the largest share of a pack's load (by size) that one of `workers` gets if its images and sounds, taken to
    be equal, are divided whole; elementwise."""
    units = costs.units(load)
    return {size: np.asarray(np.ceil(units / workers) * amount / units) for size, amount in load.items()}


def part_seconds(costs: TowerCosts, loads: Load, tower: Tower) -> Floats:
    """Return the seconds of E and V, recomputation included, on these loads: float64 [2, ...]; V's 0 if frozen."""
    forward = costs.forward(loads)
    return np.stack([forward, costs.backward(loads, tower.recompute) if costs.trained else np.zeros_like(forward)])
