"""Rows reach the ranks that run their samples next, in the samples' order, and come back the same way."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.vlm.data import stream
from megatron.vlm.data.stream import Route


class Ranks:
    """Takes each rank's turn in an exchange that is run twice: first all give, then all take."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.turn = ranks, 0
        self.given: list[list[Tensor]] = []

    def all_to_all_single(self, taken: Tensor, sent: Tensor, takes: list[int], gives: list[int], _: object) -> None:
        rank, self.turn = self.turn % self.ranks, self.turn + 1
        if self.turn <= self.ranks:
            self.given.append(list(sent.split(gives)))
            return
        parts = [given[rank] for given in self.given]
        assert [len(part) for part in parts] == takes
        taken.copy_(torch.cat(parts))

    def both(self, each: Callable[[int], object]) -> None:
        """Run every rank's part of an exchange, twice."""
        for rank in (*range(self.ranks), *range(self.ranks)):
            each(rank)


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 9))
def test_rows_go_where_their_samples_go_and_back(seed: int, ranks: int, samples: int) -> None:
    random = np.random.default_rng(seed)
    source, target = (random.integers(0, ranks, samples) for _ in range(2))
    counts = random.integers(0, 4, samples)

    def held(places: np.ndarray) -> list[Tensor]:
        """Of every rank: (sample, row) of each row, in the order of the samples."""
        names = [
            [(sample, row) for sample in np.flatnonzero(places == rank) for row in range(counts[sample])]
            for rank in range(ranks)
        ]
        return [torch.tensor(mine, dtype=torch.long).reshape(-1, 2) for mine in names]

    routes = [Route(source, target, counts, rank, ranks) for rank in range(ranks)]
    sent, there = [own.double().requires_grad_() for own in held(source)], [torch.empty(0)] * ranks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "dist", meeting := Ranks(ranks))
        meeting.both(lambda rank: there.__setitem__(rank, routes[rank].send(sent[rank], None)))
        assert all(torch.equal(*pair) for pair in zip(there, map(Tensor.double, held(target)), strict=True))
        patch.setattr(stream, "dist", meeting := Ranks(ranks))
        back = [torch.empty(0)] * ranks

        def go_back(rank: int) -> None:
            (back[rank],) = torch.autograd.grad(there[rank], sent[rank], there[rank].detach(), retain_graph=True)

        meeting.both(go_back)
    assert all(torch.equal(*pair) for pair in zip(back, sent, strict=True))
