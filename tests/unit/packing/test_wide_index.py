"""Packs of several widths: every sample once, every slot valid, ranks balanced, iterations alike."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.hierarchical import hierarchical_epoch, naive_epoch
from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.shards import shard_tokens
from omnibal_ext.reading.document import sealed
from omnibal_ext.sizes import Sizes

BUDGET = 4096
COSTS = PackCosts({"vision": {"pack": 0.0, "tiles": 2e-6},
                   "language": {"pack": 0.0, "tokens": 1e-5, "attention": 1e-9, "exchanged": 1e-6}})  # fmt: skip
OPTIONS = PackOptions(vit_budget=4 * BUDGET, llm_budget=BUDGET, data_parallel_size=8, widths=(1, 2, 4, 8),
                      pipeline_model_parallel_size=1)  # fmt: skip


def mix(samples: int, seed: int = 0) -> Sizes:
    """Chats, documents and films to eight budgets, half of whose tokens are in those longer than a rank's."""
    random = np.random.default_rng(seed)
    kind = random.choice(3, samples, p=[0.93, 0.04, 0.03])
    chat = random.lognormal(np.log(200), 0.8, samples)
    document = np.exp(random.uniform(np.log(500), np.log(8000), samples))
    film = np.exp(random.uniform(np.log(2000), np.log(8 * BUDGET), samples))
    tokens = np.minimum(np.choose(kind, [chat, document, film]).astype(np.int64) + 10, 8 * BUDGET)
    share = np.choose(kind, [0.5, 0.0, 0.95])
    return Sizes.from_arrays((3 * share * tokens).astype(np.int64), tokens)


SIZES = mix(6000)


def check_tables(index: PackedIndex, tables: np.ndarray) -> None:
    """Each pack of an iteration is once in it, in one column, on a team of neighbours that begins at its width."""
    for table in tables:
        for pack in np.unique(table[table >= 0]).tolist():
            rows, columns = np.nonzero(table == pack)
            width = index.width(pack)
            assert len(set(columns.tolist())) == 1
            assert rows.tolist() == list(range(rows[0], rows[0] + width))
            assert rows[0] % width == 0


def rank_seconds(index: PackedIndex, sizes: Sizes, tables: np.ndarray) -> np.ndarray:
    """Seconds of every rank, [I, D], from the samples of its shares: written anew here."""
    result = np.zeros(tables.shape[:2])
    for iteration, rank, column in product(*map(range, tables.shape)):
        pack = int(tables[iteration, rank, column])
        if pack < 0:
            continue
        width, own = index.width(pack), index.samples(pack)
        lengths = sizes.tokens[own].tolist()
        shares = shard_tokens(lengths, width)
        place = rank % width
        whole = [s.document for s in shares.spans[place] if s.document not in shares.cut]
        squares = sum(lengths[d] ** 2 for d in whole) + sum(lengths[d] ** 2 for d in shares.cut) / width
        result[iteration, rank] += 2e-6 * sizes.tiles[own].sum() / width + 1e-5 * shares.tokens[place] + 1e-9 * squares
        result[iteration, rank] += 1e-6 * shares.exchanged * (width - 1) / width**2
    return result


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 8])
def test_ranks_are_balanced_samples_come_once_and_hardly_more_than_must_is_exchanged(
    micro_batches: int, tmp_path: Path
) -> None:
    options = replace(OPTIONS, micro_batches=micro_batches)
    index, summary = build_index(SIZES, tmp_path / "index", options, costs=COSTS)
    assert index.manifest["version"] == 4
    index.verify()
    tables = PackStream(index, 8, micro_batches).iterations(0, summary.iterations)
    check_tables(index, tables)
    packs = np.unique(tables[tables >= 0])
    assert packs.tolist() == list(range(index.num_packs))
    assert np.sort(np.concatenate([index.samples(pack) for pack in packs])).tolist() == list(range(len(SIZES)))
    for pack in packs.tolist():
        own, width = index.samples(pack), index.width(pack)
        assert SIZES.tokens[own].sum() <= width * BUDGET
        assert SIZES.tiles[own].sum() <= 4 * width * BUDGET
        assert max(shard_tokens(SIZES.tokens[own].tolist(), width).tokens) <= BUDGET
    seconds = rank_seconds(index, SIZES, tables)
    wait = 1 - seconds.mean(axis=1).sum() / seconds.max(axis=1).sum()
    long = SIZES.tokens[SIZES.tokens > BUDGET].sum() / SIZES.tokens.sum()
    assert summary.wait == pytest.approx(wait, abs=0.003)  # the fullest place stands for all of a pack's
    assert summary.wait <= (0.004 if micro_batches < 4 else 0.002)
    assert summary.pad_ratio == 0
    assert summary.tokens_exchanged <= long + 0.01
    if micro_batches >= 4:
        assert max(summary.spread_sizes, summary.spread_sources) <= 1.1


def test_loads_of_shards_are_those_of_the_fullest_rank(tmp_path: Path) -> None:
    """Of wide packs filled with short samples, each complete on one rank."""
    sizes = mix(1500, 3)
    index, _ = build_index(sizes, tmp_path / "index", OPTIONS, costs=COSTS)
    assert index.exchanged is not None
    for pack in range(index.num_packs):
        own, width = index.samples(pack), index.width(pack)
        lengths = sizes.tokens[own].tolist()
        shares = shard_tokens(lengths, width)
        cut = [lengths[document] for document in shares.cut]
        whole = [
            [lengths[span.document] for span in spans if span.document not in shares.cut] for spans in shares.spans
        ]
        squares = [sum(length**2 for length in mine) + sum(n**2 for n in cut) / width for mine in whole]
        tiles, tokens, attention = index.rank_loads[pack].tolist()
        assert (tiles, tokens) == (-(-int(sizes.tiles[own].sum()) // width), max(shares.tokens))
        assert attention == pytest.approx(max(squares), abs=1)
        # of its part of the tokens a rank keeps its part of the heads
        assert index.exchanged[pack] == pytest.approx(sum(cut) / width * (1 - 1 / width), abs=1)


def test_figures_of_wide_packs_are_those_of_the_files(tmp_path: Path) -> None:
    sizes = mix(1500, 3)
    index, summary = build_index(sizes, tmp_path / "index", replace(OPTIONS, micro_batches=4), costs=COSTS)
    widths, seats = np.load(index.folder / "pack_widths.npy"), np.load(index.folder / "pack_seats.npy")
    wide = [index.samples(pack) for pack in range(index.num_packs) if widths[pack] > 1]
    tokens = int(sizes.tokens.sum())
    each = zip(wide, widths[widths > 1].tolist(), strict=True)
    cut = sum(shard_tokens(sizes.tokens[own].tolist(), width).exchanged for own, width in each)
    assert summary.seats == widths.sum() == (seats >= 0).sum()
    assert summary.filled_packs == (seats < 0).sum()
    assert summary.tokens_in_wide_packs == pytest.approx(sum(int(sizes.tokens[own].sum()) for own in wide) / tokens)
    assert summary.tokens_exchanged == pytest.approx(cut / tokens)
    assert summary.tokens_per_rank == pytest.approx(tokens / summary.iterations / 8)
    held = np.array([int(sizes.tokens[index.samples(pack)].sum()) for pack in range(index.num_packs)])
    of_seats = np.where(seats >= 0, (held / widths)[seats], 0).reshape(summary.iterations, -1).sum(axis=1)
    drawn = len(sizes) / summary.iterations
    random = sizes.tokens.std() * np.sqrt(drawn * (1 - (drawn - 1) / (len(sizes) - 1)))
    assert summary.spread_sizes >= of_seats.std() / random * 0.999


def test_a_corpus_without_long_samples_has_the_index_it_has_without_widths(tmp_path: Path) -> None:
    short = SIZES.take(np.flatnonzero((SIZES.tokens <= BUDGET) & (SIZES.tiles <= 4 * BUDGET))[:800])
    plain, _ = build_index(short, tmp_path / "plain", replace(OPTIONS, widths=(1,)), costs=COSTS)
    offered, _ = build_index(short, tmp_path / "offered", OPTIONS, costs=COSTS)
    names = sorted(path.name for path in plain.folder.iterdir())
    assert names == sorted(path.name for path in offered.folder.iterdir())
    for name in names:
        assert (plain.folder / name).read_bytes() == (offered.folder / name).read_bytes()
    assert plain.manifest["version"] == 3


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    sizes = mix(1500, 1)
    one, two = (build_index(sizes, tmp_path / name, OPTIONS, costs=COSTS)[0] for name in "ab")
    assert one.manifest == two.manifest


def test_at_other_ranks_the_same_packs_run_in_every_iteration(tmp_path: Path) -> None:
    index, summary = build_index(SIZES, tmp_path / "index", replace(OPTIONS, micro_batches=4), costs=COSTS)
    stored = PackStream(index, 8, 4)
    for ranks, micro_batches in ((16, 2), (32, 1)):
        other = PackStream(index, ranks, micro_batches)
        for number in (0, summary.iterations - 1, summary.iterations, 3 * summary.iterations + 1):
            table = other.iteration(number)
            assert table.shape == (ranks, micro_batches)
            check_tables(index, table[None])
            assert np.unique(table).tolist() == np.unique(stored.iteration(number)).tolist()
    seconds = rank_seconds(index, SIZES, PackStream(index, 16, 2).iterations(0, summary.iterations))
    assert 1 - seconds.mean(axis=1).sum() / seconds.max(axis=1).sum() < 0.25  # .42 in any order


def test_epochs_end_between_packs_and_have_each_once(tmp_path: Path) -> None:
    index, _ = build_index(SIZES, tmp_path / "index", replace(OPTIONS, micro_batches=4), costs=COSTS)
    stream = PackStream(index, 8, 4)
    for epoch in range(3):
        tables = stream.iterations(stream.first_iteration(epoch), stream.first_iteration(epoch + 1))
        check_tables(index, tables)
        packs, seats = np.unique(tables[tables >= 0], return_counts=True)
        assert packs.tolist() == list(range(index.num_packs))
        assert seats.tolist() == [index.width(pack) for pack in packs.tolist()]


def test_separate_sources_repeated_samples_and_separate_epochs(tmp_path: Path) -> None:
    """Weights and groups give iterations of one width."""
    corpus = Corpus(mix(2000, 2), (CorpusSource("a", 1200, 2.0), CorpusSource("b", 800, 0.5)))
    corpus = replace(corpus, groups=corpus.source_numbers())
    index, _ = build_index(corpus, tmp_path / "index", replace(OPTIONS, micro_batches=2), costs=COSTS)
    assert len(index.manifest["epoch_seats"]) == 2
    stream, numbers = PackStream(index, 8, 2), corpus.source_numbers()
    seen = np.zeros(2000, np.int64)
    for epoch in range(2):
        tables = stream.iterations(stream.first_iteration(epoch), stream.first_iteration(epoch + 1))
        check_tables(index, tables)
        for pack in np.unique(tables[tables >= 0]).tolist():
            own = index.samples(pack)
            assert len(set(own.tolist())) == len(own)
            assert len(set(numbers[own].tolist())) == 1
            seen[own] += 1
    assert seen.tolist() == [4] * 1200 + [1] * 800


def test_a_pipeline_waits_for_vision_and_language_separately(tmp_path: Path) -> None:
    options = replace(OPTIONS, micro_batches=8, pipeline_model_parallel_size=2)
    _, summary = build_index(SIZES, tmp_path / "index", options, costs=COSTS)
    assert summary.wait <= 0.004


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of eight ranks, four packs each."""
    folder = tmp_path_factory.mktemp("sound") / "index"
    build_index(mix(1500, 3), folder, replace(OPTIONS, micro_batches=4), costs=COSTS)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "index"))


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        *(("pack_widths.npy", lambda a, w=w: np.where(a == 8, w, a), "widths that are none of") for w in (3, 0, 16)),
        ("pack_widths.npy", lambda a: np.where(a == 8, 4, a), "slot on each of their ranks"),
        ("pack_widths.npy", lambda a: a[:-1], "has shape"),
        ("pack_widths.npy", lambda a: a.astype(np.int32), "has shape"),
        *(("pack_seats.npy", lambda a, p=p: np.where(a == 0, a.max() + 1 if p is None else p, a),
           "slot on each of their ranks") for p in (1, -2, None)),
        ("pack_seats.npy", lambda a: a[:-1], "has shape"),
        ("share_loads.npy", lambda a: a[:, :-1], "has shape"),
        ("share_loads.npy", lambda a: -a, "below 0"),
    ],
)  # fmt: skip
def test_damage_is_named(name: str, change: Any, says: str, folder: Path) -> None:
    np.save(folder / name, change(np.load(folder / name)))
    with pytest.raises(UserError, match=rf"index/(pack_seats.npy|{name}): .*{says}.*; pack again with omnibal pack"):
        PackedIndex.open(folder)


@pytest.mark.parametrize("name", ["pack_widths.npy", "pack_seats.npy", "share_loads.npy"])
@pytest.mark.parametrize("at", [0.0, 0.3, 0.99])
def test_a_flipped_bit_a_lost_end_and_a_lost_file_are_named(name: str, at: float, folder: Path) -> None:
    path = folder / name
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[int(at * len(whole))] ^= 1
    for damaged in (bytes(flipped), whole[:-8], whole[: int(at * len(whole))]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"index/(pack_seats|{name[:-4]})\.npy: .*pack again"):
            PackedIndex.open(folder).verify()
    path.unlink()
    with pytest.raises(UserError, match=rf"{name}.*pack again"):
        PackedIndex.open(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"widths": [1, 2, 3]}, "3 must be a multiple of 2"), ({"widths": [1, 16]}, "16 ranks must divide"),
        ({"widths": [2, 1]}, "1 must be a multiple of 2"), ({"widths": []}, "widths"), ({"widths": [0, 8]}, "widths"),
        ({"widths": None}, "lacks widths"), ({"epoch_seats": None}, "epoch_parts"),
        ({"epoch_seats": [15 * 32 + 1]}, "whole iterations of 32"),
        ({"epoch_seats": [15 * 32] * 2}, "whole iterations of 32"), ({"epoch_parts": [[10**6]]}, "more than its"),
        ({"data_parallel_size": 6}, "8 ranks must divide"), ({"micro_batches": None}, "lacks micro_batches"),
        ({"version": 3}, "which only version 4 has"), ({"version": 5}, "is no packed index"),
    ],
)  # fmt: skip
def test_a_manifest_that_cannot_be_is_refused_by_its_field(change: dict[str, Any], says: str, folder: Path) -> None:
    """Even if its hash fits; if not, no field is read."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    changed = {name: value for name, value in (manifest | change).items() if value is not None}
    for written, found in ((changed, ""), (sealed(changed), says)):
        path.write_text(json.dumps(written))
        with pytest.raises(UserError, match=rf"index/manifest\.json: .*{found}.*; pack again with omnibal pack"):
            PackedIndex.open(folder)


def test_hbp_has_levels_of_equal_attention_and_random_order_has_none(tmp_path: Path) -> None:
    hbp = replace(OPTIONS, widths=(1, 8))
    index, summary = build_index(SIZES, tmp_path / "hbp", hbp, costs=COSTS, packer=hierarchical_epoch)
    tables = PackStream(index, 8, 1).iterations(0, summary.iterations)
    check_tables(index, tables)
    widths = [{index.width(pack) for pack in np.unique(table[table >= 0]).tolist()} for table in tables]
    assert all(len(each) == 1 for each in widths)
    long = np.flatnonzero((SIZES.tokens > BUDGET) | (SIZES.tiles > 4 * BUDGET))
    needing = sum(bool(np.isin(index.samples(pack), long).any()) for pack in range(index.num_packs))
    assert needing == sum(index.width(pack) == 8 for pack in range(index.num_packs))
    assert summary.tokens_in_wide_packs < 0.75
    naive, random = build_index(SIZES, tmp_path / "naive", replace(hbp, widths=(8,)), costs=COSTS, packer=naive_epoch)
    assert random.tokens_in_wide_packs == 1
    assert {naive.width(pack) for pack in range(naive.num_packs)} == {8}
    assert json.loads((index.folder / "manifest.json").read_text())["widths"] == [1, 8]


def test_packs_of_one_width_alone_have_every_sample(tmp_path: Path) -> None:
    """No pack is of one rank."""
    options = replace(OPTIONS, widths=(8,), micro_batches=2)
    index, summary = build_index(SIZES, tmp_path / "index", options, costs=COSTS)
    assert {index.width(pack) for pack in range(index.num_packs)} == {8}
    check_tables(index, PackStream(index, 8, 2).iterations(0, summary.iterations))
    assert np.sort(index.sample_ids).tolist() == list(range(len(SIZES)))
