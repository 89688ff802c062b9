"""Both layouts of a tower: what a plan says of E and V, how fast a replica exchanges, and that auto is the faster.

References are written out here: images dealt one by one, ranks numbered as Megatron does, all starts simulated.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import DEVICES, analytic_profile
from omnibal_ext.costs.profile import PackSizes
from omnibal_ext.errors import UserError
from omnibal_ext.layout.insertion_search import assignments, starts_of
from omnibal_ext.layout.search import make_plan
from omnibal_ext.layout.tower_layout import _with_insertions, plan_beside, plan_tower
from tests.unit.layout.test_beside import problem, small


def longest_share(tiles: int, workers: int) -> int:
    """Images of one tile dealt like cards."""
    return max(Counter(image % workers for image in range(tiles)).values(), default=0)


@pytest.mark.parametrize(("tensor", "memory", "again"), [(1, 500.0, False), (2, 500.0, False), (2, 220.0, True)])
def test_a_plan_says_what_e_and_v_take(tensor: int, memory: float, again: bool) -> None:
    """The mean over packs and ranks that encode them; the tower's layers as `small` prices them."""
    whole = replace(problem(4, 3, 6, memory_bytes=memory), profile=small(tensor=tensor))
    found, candidates = plan_beside(whole, "joint", seconds=0.1)
    plan = make_plan(found, candidates, "joint")
    assert plan.tower is not None
    assert bool(plan.tower.recompute) == again
    assert isinstance(whole.packs, PackSizes)
    forward, backward = [], []
    for tiles in whole.packs.tiles.reshape(-1, 6):
        for number, ranks in zip(tiles.tolist(), plan.tower.encoding_ranks, strict=True):
            most = longest_share(number, len(ranks) * tensor)
            executor = 0.003 if most else 0.0
            rerun = len(plan.tower.recompute) * (0.1 + 0.05 * most)
            vit, others = 2 * (0.1 + 0.05 * most), 2 * 0.1 * most / 4
            forward += [(vit + others + executor) if most else 0.0] * len(ranks)
            backward += [(2 * (vit + others) + rerun + executor) if most else 0.0] * len(ranks)
    assert plan.predicted["tower_seconds"] == pytest.approx([np.mean(forward), np.mean(backward)], rel=1e-12)


@pytest.mark.parametrize(
    "sizes", [(1, 2, 2), (1, 8, 4), (2, 4, 4), (4, 2, 4), (8, 1, 4), (8, 4, 2), (1, 4, 4), (2, 1, 2)]
)
def test_a_replica_exchanges_over_the_adapters_that_its_ranks_have(sizes: tuple[int, int, int]) -> None:
    """Ranks stand in Megatron's order, tensor, data, pipeline, eight to a node."""
    tensor, data, pipeline = sizes
    nodes = Counter((t + tensor * data * p) // 8 for t in range(tensor) for p in range(pipeline))
    gpu = DEVICES["h100"]
    fewest = min(nodes.values())
    rate = gpu.node_bandwidth if len(nodes) == 1 else min(gpu.node_bandwidth, fewest * gpu.network_bandwidth)
    profile = analytic_profile(
        preset("qwen2.5-vl-7b"), "h100", {"tiles": 64, "tokens": 64}, tensor, data, replica_ranks=tensor * pipeline
    )
    assert 1 / profile.replica_seconds_per_byte == pytest.approx(0.8 * rate)


def test_auto_is_never_slower_than_either_layout() -> None:
    """Over random packs, pipelines, schedules and memories; where one has no plan the other is taken."""
    taken = Counter[str]()
    for seed in range(8):
        random = np.random.default_rng(seed)
        ranks, chunks = int(random.integers(1, 4)), int(random.integers(1, 3))
        schedule = str(random.choice(["1f1b", "zb_h1", "zb_auto"]))
        chunks = 1 if ranks == 1 or 2 * ranks * chunks > 8 else chunks
        memory, trained = float(random.choice([150.0, 250.0, 500.0])), bool(random.random() < 0.7)
        microbatches = 2 * ranks
        asked = problem(seed, ranks, microbatches, trained, schedule_name=schedule, chunks=chunks, memory_bytes=memory)
        steps: dict[str, float] = {}
        for layout in ("cut", "beside", "auto"):
            try:
                _, candidates, said = plan_tower(asked, layout, "joint", seconds=0.05)
            except UserError:
                continue
            steps[layout] = candidates[0].step_seconds
            if layout == "auto":
                taken[said["tower"]["road"]] += 1
        alone = [steps[layout] for layout in ("cut", "beside") if layout in steps]
        assert steps.get("auto") == min(alone, default=None)
    assert min(taken["cut"], taken["beside"]) > 1


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_no_start_is_faster_than_what_the_search_finds(schedule: str) -> None:
    """Every dealing gives each microbatch to somebody; all starts are simulated, with the layout that was found."""
    whole = problem(5, 4, 8, schedule_name=schedule, memory_bytes=1e6)
    found, (best,) = plan_beside(whole, "joint", seconds=0.1)
    assert found.beside is not None
    alone = replace(found, lists=None, beside=None)
    for parts in assignments(4, 8):
        assert len(parts) == 8
        assert all(ranks and set(ranks) <= set(range(4)) for ranks in parts)
    assert {len(ranks) for parts in assignments(4, 8) for ranks in parts} == {1, 2, 4}
    for starts in starts_of(alone, ahead=False):
        for insertions in starts:
            start = _with_insertions(whole, alone, found.beside, insertions)
            assert best.step_seconds <= start.step_seconds(best.layout) * (1 + 1e-9)
