"""What layers draw in an iteration follows from the seed, the iteration and the rank's place, and nothing else."""

from itertools import product

import pytest
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import random

from megatron.vlm.models.draws import begin_draws

SEEDS, ITERATIONS, PIPELINE, DATA, TENSOR = (1, 2), (1, 2), (0, 1), (0, 1), (0, 1)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], tuple[float, float]]:
    """Of every place: what all tensor-parallel ranks of a group draw, and what is each one's own."""
    found = {}
    for seed, iteration, pipeline, data, tensor in product(SEEDS, ITERATIONS, PIPELINE, DATA, TENSOR):
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda rank=pipeline: rank)
        monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda rank=data: rank)
        monkeypatch.setattr(random, "get_tensor_model_parallel_rank", lambda rank=tensor: rank)
        for name in ("get_expert_model_parallel_rank", "get_expert_tensor_parallel_rank"):
            monkeypatch.setattr(random, name, lambda: 0)
        torch.rand(seed + 3 * iteration + pipeline)  # whatever was drawn before
        begin_draws(seed, iteration)
        alike = torch.rand(1).item()
        with tensor_parallel.get_cuda_rng_tracker().fork():
            found[seed, iteration, pipeline, data, tensor] = alike, torch.rand(1).item()
    return found


def test_masks_follow_from_seed_iteration_and_place(drawn: dict[tuple[int, ...], tuple[float, float]]) -> None:
    groups = {place[:-1]: {drawn[*place[:-1], tensor][0] for tensor in TENSOR} for place in drawn}
    assert all(len(alike) == 1 for alike in groups.values())
    assert len(set.union(*groups.values())) == len(groups)
    assert len({own for _, own in drawn.values()}) == len(drawn)


def test_what_was_drawn_before_changes_nothing(drawn: dict[tuple[int, ...], tuple[float, float]]) -> None:
    begin_draws(2, 2)  # by the last rank of the fixture, after all that it drew
    assert torch.rand(1).item() == drawn[2, 2, 1, 1, 1][0]
