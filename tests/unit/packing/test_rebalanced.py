"""An index rebalanced for other ranks: nobody waits, no epoch loses a pack, and what ran before stays as it ran."""

import json
import sys
from copy import copy
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.rebalanced import RankLayout, rebalance, write_rebalanced
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.metrics import rank_loads, wait
from omnibal_ext.sizes import Sizes
from tools import level_packs


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> PackedIndex:
    """Eight ranks of four packs; an epoch has parts, for one source is seen twice, and ends within an iteration."""
    generator = np.random.default_rng(0)
    tiles = generator.integers(0, 7, 6_000)
    sizes = Sizes.from_arrays(tiles, tiles * 256 + generator.lognormal(5.3, 0.8, 6_000).astype(int).clip(8, 1500))
    corpus = Corpus(sizes, (CorpusSource("a", 4_000), CorpusSource("b", 2_000, 2.0)))
    options = PackOptions(vit_budget=12, llm_budget=4096, data_parallel_size=8, micro_batches=4, seconds=0.3)
    return build_index(corpus, tmp_path_factory.mktemp("packs") / "index", options)[0]


def rebalanced(index: PackedIndex, ranks: RankLayout, since: int) -> tuple[PackStream, PackStream]:
    before = PackStream(index, *ranks)
    path = write_rebalanced(index, ranks, rebalance(index, before.order, ranks, since))
    after = PackStream(index, *ranks)
    path.unlink()
    return before, after


@pytest.mark.parametrize(("ranks", "since", "most"), [(16, 0, 0.003), (16, 5, 0.0035), (32, 0, 0.0045)])
def test_more_ranks_wait_no_longer_than_may_be(index: PackedIndex, ranks: int, since: int, most: float) -> None:
    """Nor in what is left of a running epoch; where a rank has one pack, others cannot make up for it."""
    streams = rebalanced(index, RankLayout(ranks, 32 // ranks, "next_epoch"), since)
    seconds, groups = index.seconds(np.arange(index.num_packs)), index.num_packs // 32 - 1
    waits = [wait(rank_loads(stream.iterations(since, groups), seconds)) for stream in streams]
    assert waits[1] <= most < waits[0] / 2


@pytest.mark.parametrize(
    ("since", "last_iteration"), [(0, "next_epoch"), (1, "empty"), (17, "empty"), (40, "next_epoch"), (75, "empty")]
)
def test_each_epoch_runs_each_pack_once_and_what_ran_before_is_as_it_was(
    index: PackedIndex, since: int, last_iteration: str
) -> None:
    before, after = rebalanced(index, RankLayout(16, 2, last_iteration), since)
    assert all(np.array_equal(before.iteration(number), after.iteration(number)) for number in range(since))
    assert not np.array_equal(before.iterations(since, since + 30), after.iterations(since, since + 30))
    starts = [before.order.start_of(epoch) for epoch in range(4)]
    ran = after.iterations(0, -(-starts[3] // 32)).reshape(-1, 32)
    for start, end in pairwise(starts):  # an iteration in which two epochs meet is of both
        own = ran[-(-start // 32) : end // 32]
        assert np.bincount(own[own >= 0]).max() == 1
        both = ran[start // 32 : -(-end // 32)]
        assert len(np.unique(both[both >= 0])) == index.num_packs
    counts = np.bincount(ran[ran >= 0], minlength=index.num_packs)
    assert counts.min() == 3
    assert counts.sum() - 3 * index.num_packs == (-starts[3] % 32 if last_iteration == "next_epoch" else 0)


def test_an_order_that_a_run_may_obey_is_not_replaced(index: PackedIndex) -> None:
    ranks = RankLayout(16, 2, "next_epoch")
    order = PackStream(index, *ranks).order
    path = write_rebalanced(index, ranks, rebalance(index, order, ranks, 5))
    once = path.read_bytes()
    assert write_rebalanced(index, ranks, rebalance(index, order, ranks, 5)).read_bytes() == once
    with pytest.raises(UserError, match="starts at iteration 5, not 9"):
        write_rebalanced(index, ranks, rebalance(index, order, ranks, 9))
    path.write_bytes(Path(index.folder / "sample_ids.npy").read_bytes())
    with pytest.raises(UserError, match="is no order"):
        PackStream(index, *ranks)
    path.unlink()


def test_it_waits_for_as_long_as_its_index_may(index: PackedIndex) -> None:
    """`--wait` is the index's: with ten times as much iterations look more alike, and more is waited."""
    waits = []
    for share in (0.003, 0.03):
        patient = copy(index)
        patient.manifest = {**index.manifest, "wait": share}
        _, after = rebalanced(patient, RankLayout(32, 1, "next_epoch"), 0)
        seconds, groups = index.seconds(np.arange(index.num_packs)), index.num_packs // 32 - 1
        waits.append(wait(rank_loads(after.iterations(0, groups), seconds)))
    assert 0.006 < waits[1] < 0.03
    assert waits[0] < 0.0045


@pytest.mark.parametrize("last_iteration", ["next_epoch", "empty"])
@pytest.mark.parametrize(("since", "most"), [(0, 1000), (5, 1000), (5, 4), (40, 1)])
def test_what_is_waited_is_said_of_the_iterations_from_the_new_order_on(
    since: int, most: int, last_iteration: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Those of an epoch, or as many as are measured: each part of a step waits for its slowest rank."""
    generator, ranks = np.random.default_rng(1), RankLayout(4, 1, last_iteration)
    sizes = Sizes.from_arrays(generator.integers(0, 7, 150), generator.integers(1800, 3000, 150))
    options = PackOptions(vit_budget=12, llm_budget=4096, data_parallel_size=1, micro_batches=4, seconds=0.0)
    index = build_index(sizes, tmp_path / "index", options)[0]
    seconds = index.seconds(np.arange(index.num_packs))

    def waited() -> float:
        """Parts add up over iterations; packs that are none cost nothing."""
        stream, busy, mean = PackStream(index, *ranks), 0.0, 0.0
        for number in range(since, since + min(most, stream.iterations_per_epoch)):
            work = [[pack >= 0 and part for part in seconds[pack]] for (pack,) in stream.iteration(number).tolist()]
            busy += sum(max(parts) for parts in zip(*work, strict=True))
            mean += sum(sum(parts) / len(work) for parts in zip(*work, strict=True))
        return float(1 - mean / busy)

    monkeypatch.setattr(level_packs, "MEASURED", most)
    words = ["--data-parallel-size", "4", "--iteration", str(since), "--last-iteration", last_iteration, "--json"]
    monkeypatch.setattr(sys, "argv", ["level_packs.py", str(index.folder), *words])
    before = waited()
    level_packs.main()
    said = json.loads(capsys.readouterr().out)
    assert said["iteration"] == since
    assert Path(said["written"]) == ranks.path(index)
    assert (said["wait_before"], said["wait"]) == (pytest.approx(before), pytest.approx(waited()))
    assert said["wait"] != said["wait_before"]
