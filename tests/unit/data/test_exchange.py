"""Rows reach the ranks that run their samples next, in the samples' order, and come back the same way."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.vlm.data import exchange
from megatron.vlm.data.exchange import Route


def sent_between(routes: list[Route], rows: list[Tensor], monkeypatch: pytest.MonkeyPatch, method: str) -> list[Tensor]:
    """What all ranks hold after an exchange: first all give, then all take."""
    given_away: list[list[Tensor]] = []

    def give(_: Tensor, sent: Tensor, __: list[int], gives: list[int], ___: object) -> None:
        given_away.append(list(sent.split(gives)))

    monkeypatch.setattr(exchange.torch.distributed, "all_to_all_single", give)
    for route, own in zip(routes, rows, strict=True):
        getattr(route, method)(own)
    ranks = iter(range(len(routes)))

    def take(taken: Tensor, _: Tensor, takes: list[int], __: list[int], ___: object) -> None:
        rank = next(ranks)
        parts = [given_away[other][rank] for other in range(len(routes))]
        assert [len(part) for part in parts] == takes
        taken.copy_(torch.cat(parts))

    monkeypatch.setattr(exchange.torch.distributed, "all_to_all_single", take)
    return [getattr(route, method)(own) for route, own in zip(routes, rows, strict=True)]


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
    with pytest.MonkeyPatch.context() as patch:
        there = sent_between(routes, held(source), patch, "send")
        assert all(torch.equal(*pair) for pair in zip(there, held(target), strict=True))
        back = sent_between(routes, there, patch, "send_back")
        assert all(torch.equal(*pair) for pair in zip(back, held(source), strict=True))
