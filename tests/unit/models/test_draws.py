"""What a layer draws for a pack follows from the seed, the iteration, the pack and its place in the chain alone."""

from itertools import product

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random

from megatron.vlm.data.pack_shard import shard_of
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.draws import begin_draws
from tests.unit.data.test_pack_shard import drawn as wide_pack

SEEDS, ITERATIONS, PACKS, LINKS, TENSOR = (1, 2), (1, 2), (-1, 0, 1), (0, 1), (0, 1)


def pack_of(iteration: int, pack: int) -> Microbatch:
    return Microbatch((1,), 1, 1, iteration=iteration, pack=pack)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, ...], tuple[float, float]]:
    """Of every place: what all tensor-parallel ranks of a group draw, and what is each one's own."""
    found = {}
    for name in ("get_expert_model_parallel_rank", "get_expert_tensor_parallel_rank"):
        monkeypatch.setattr(random, name, lambda: 0)
    for seed, iteration, pack, layer, tensor in product(SEEDS, ITERATIONS, PACKS, LINKS, TENSOR):
        monkeypatch.setattr(random, "get_tensor_model_parallel_rank", lambda rank=tensor: rank)
        torch.rand(seed + 3 * iteration + pack)  # whatever was drawn before
        begin_draws(seed, pack_of(iteration, pack), layer)
        alike = torch.rand(1).item()
        with tensor_parallel.get_cuda_rng_tracker().fork():
            found[seed, iteration, pack, layer, tensor] = alike, torch.rand(1).item()
    return found


def test_masks_follow_from_seed_iteration_pack_and_link(drawn: dict[tuple[int, ...], tuple[float, float]]) -> None:
    groups = {place[:-1]: {drawn[*place[:-1], tensor][0] for tensor in TENSOR} for place in drawn}
    assert all(len(alike) == 1 for alike in groups.values())
    assert len(set.union(*groups.values())) == len(groups)
    assert len({own for _, own in drawn.values()}) == len(drawn)


@pytest.mark.usefixtures("drawn")
def test_ranks_of_a_team_draw_for_tokens_of_their_own() -> None:
    pack, spans, makers, width = wide_pack(0, False)
    drawn = set()
    for place in range(width):
        begin_draws(1, shard_of(pack, spans, makers, place), 0)
        drawn.add(torch.rand(1).item())
    assert len(drawn) == width >= 2


def test_what_was_drawn_before_changes_nothing(drawn: dict[tuple[int, ...], tuple[float, float]]) -> None:
    begin_draws(2, pack_of(2, 1), 1)  # by the last rank of the fixture, after all that it drew
    assert torch.rand(1).item() == drawn[2, 2, 1, 1, 1][0]
