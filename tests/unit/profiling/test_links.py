"""Transfers as they are measured: on a made-up network the profiler finds the figures that it was made of."""

from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.vlm.profiling import action_costs
from megatron.vlm.profiling.action_costs import TransferCosts, measure_transfers


class Network:
    """A clock that goes on when something is carried: `latency` and a time a byte each way."""

    def __init__(self, latency: float, a_byte: float, reduced_byte: float) -> None:
        self.latency, self.a_byte, self.reduced_byte, self.now = latency, a_byte, reduced_byte, 0.0
        self.carried: list[str] = []

    def carry(self, what: str, size: int) -> None:
        self.carried.append(what)
        self.now += self.latency + size * self.a_byte

    def timed(self, *works: Callable[[], object]) -> tuple[float, ...]:
        ends = [self.now]
        for work in works:
            work()
            ends.append(self.now)
        return tuple(end - start for start, end in pairwise(ends))


class Ring:
    """The communicator of either end; what it does not send travels when it waits for it."""

    def __init__(self, network: Network) -> None:
        self.network = network

    def send(self, what: str, tensor: torch.Tensor, to: int) -> None:
        self.network.carry(f"{what} to {to}", tensor.nbytes)

    def receive(self, what: str, shape: tuple[int, ...], kind: torch.dtype, of: int) -> SimpleNamespace:
        size = torch.empty(shape, dtype=kind).nbytes
        return SimpleNamespace(wait=lambda: self.network.carry(f"{what} of {of}", size))

    def finish(self) -> None:
        pass


def measured(
    network: Network, ranks: int, here: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[TransferCosts, list[list[int]]]:
    pairs: list[list[int]] = []

    def pair(ranks: list[int]) -> list[int]:
        pairs.append(ranks)
        return ranks

    def reduce(tensor: torch.Tensor, group: list[int]) -> None:
        assert here in group
        network.now += tensor.nbytes * network.reduced_byte

    def ring(group: list[int], _: object) -> Ring:
        assert here in group
        return Ring(network)

    world: Any = SimpleNamespace(get_world_size=lambda: ranks, get_rank=lambda: here, new_group=pair, all_reduce=reduce)
    stopwatch: Any = SimpleNamespace(
        measure=lambda runs: {s: {n: run() for n, run in named.items()} for s, named in runs.items()}
    )
    monkeypatch.setattr(action_costs, "dist", world)
    monkeypatch.setattr(action_costs, "Communicator", ring)
    monkeypatch.setattr(action_costs, "Timer", lambda: network.timed)
    monkeypatch.setattr(action_costs, "torch", SimpleNamespace(zeros=lambda count, device: torch.zeros(count)))
    return measure_transfers(stopwatch), pairs


@pytest.mark.parametrize(("ranks", "here"), [(2, 0), (2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("figures", [(1e-2, 1e-9, 3e-9), (1e-2, 0.0, 0.0), (0.0, 2e-9, 1e-9)])
def test_links_are_those_of_the_way_there(
    figures: tuple[float, float, float], ranks: int, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next to nothing of the small transfer is four bytes."""
    found, pairs = measured(network := Network(*figures), ranks, here, monkeypatch)
    latency, a_byte, reduced_byte = figures
    assert found.transfer_latency_seconds == pytest.approx(latency + 4 * a_byte)
    assert found.transfer_seconds_per_byte == pytest.approx(a_byte, rel=1e-5)
    assert found.reduction_seconds_per_byte == pytest.approx(reduced_byte)
    assert pairs == [[rank, rank + ranks // 2] for rank in range(ranks // 2)]
    first = ["activation to 1", "gradient of 1"]
    assert network.carried == 4 * (first if here < ranks // 2 else ["activation of 0", "gradient to 0"])


def test_a_large_transfer_that_was_faster_took_no_less_than_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = measured(Network(1e-2, -1e-9, 0.0), 2, 0, monkeypatch)
    assert found.transfer_seconds_per_byte == 0.0


def test_one_rank_has_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured(Network(1.0, 1.0, 1.0), 1, 0, monkeypatch) == (TransferCosts(), [])
