"""Corpora of any size: from arrays on disk, with bounded memory, the index is the same."""

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnibal_ext import large_arrays
from omnibal_ext import sizes as sizes_module
from omnibal_ext.arrays import Ints
from omnibal_ext.errors import UserError
from omnibal_ext.large_arrays import growing_array, in_pieces, rows_of, scratch
from omnibal_ext.packing import pack_epoch
from omnibal_ext.packing import twins as twins_module
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.index import summary as summary_module
from omnibal_ext.packing.index.dispatch import PackStream, epoch_iterations
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packs import PackList, pack_loads
from omnibal_ext.sizes import Sizes

OPTIONS = PackOptions(vit_budget=12, llm_budget=4096, data_parallel_size=4, seconds=0.1)
ROWS = 1000


def words_and_images(samples: int, seed: int = 1) -> Sizes:
    generator = np.random.default_rng(seed)
    tiles = generator.choice([0, 1, 2, 5], samples, p=[0.2, 0.4, 0.3, 0.1])
    return Sizes.from_arrays(tiles, tiles * 256 + generator.lognormal(5, 0.7, samples).astype(np.int64) + 8)


def folder_of(folder: Path, sizes: Sizes) -> Path:
    """Write a folder of .npy files, of the smallest types that hold the values."""
    folder.mkdir()
    np.save(folder / "tiles.npy", sizes.tiles.astype(np.uint8))
    np.save(folder / "tokens.npy", sizes.tokens.astype(np.int16))
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few samples are many: folders stay on disk, packs are of twins, pieces are short."""
    for module, name, value in (
        (sizes_module, "MAPPED", 100), (large_arrays, "PIECE", ROWS), (pack_epoch, "MANY", 300),
        (twins_module, "LONGER", 0.02),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


def content(index: PackedIndex) -> dict[str, Any]:
    return {name: value for name, value in index.manifest.items() if name not in ("sources", "sha256", "built_from")}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("case", ["one folder", "two folders", "samples left out", "random parts", "microbatches"])
def test_from_disk_the_index_is_that_from_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str) -> None:
    sizes, options = words_and_images(12_000), OPTIONS
    if case == "samples left out":
        options = replace(options, llm_budget=2000)
    if case == "microbatches":
        options = replace(options, micro_batches=4)
    if case == "random parts":
        monkeypatch.setattr(twins_module, "LONGER", 0.0)
    monkeypatch.setattr(pack_epoch, "AT_ONCE", 5000)
    ends = [0, 7000, 12_000] if case == "two folders" else [0, 12_000]
    parts = [sizes.take(np.arange(first, end)) for first, end in pairwise(ends)]
    folders = [folder_of(tmp_path / f"sizes-{number}", part) for number, part in enumerate(parts)]
    on_disk = Corpus.load(folders)
    assert isinstance(on_disk.sizes.tokens, np.memmap)
    in_memory = replace(on_disk, sizes=sizes)
    one, of_disk = build_index(on_disk, tmp_path / "disk", options)
    other, of_memory = build_index(in_memory, tmp_path / "memory", options)
    assert content(one) == content(other)
    assert replace(of_disk, seconds=0, samples_per_second=0, compile_seconds=0) == replace(
        of_memory, seconds=0, samples_per_second=0, compile_seconds=0
    )
    packs = PackList(np.asarray(one.pack_offsets), np.asarray(one.sample_ids))
    fits = np.flatnonzero(sizes.tokens <= options.llm_budget)
    assert np.array_equal(np.sort(packs.sample_ids), fits)
    assert (len(fits) < len(sizes)) == (case == "samples left out")
    assert np.array_equal(one.loads, pack_loads(packs, sizes))
    assert one.loads[:, 0].max() <= options.vit_budget
    assert one.loads[:, 1].max() <= options.llm_budget
    assert len(one.manifest["epoch_parts"][0]) == (3 if case == "random parts" else 1)
    assert one.num_packs <= 1.01 * of_disk.lower_bound_packs


@pytest.mark.usefixtures("small")
def test_an_epoch_of_any_size_has_each_sample_once_and_hardly_waits(tmp_path: Path) -> None:
    """Also the epoch after it, of the same packs in another order."""
    corpus = Corpus.load([folder_of(tmp_path / "sizes", words_and_images(24_000))])
    index, summary = build_index(corpus, tmp_path / "packs", OPTIONS)
    stream = PackStream(index, 4, 1, "empty")
    for epoch in range(2):
        iterations = stream.iterations(stream.first_iteration(epoch), stream.first_iteration(epoch + 1))
        packs = iterations[iterations >= 0]
        assert np.array_equal(np.sort(np.concatenate([index.samples(pack) for pack in packs])), np.arange(24_000))
    assert summary.wait < 2 * OPTIONS.wait  # of so few samples twins differ more
    assert summary.wait_last < 0.02
    assert max(summary.spread_sizes, summary.spread_sources) < 1.1


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("most_iterations", [1, 4000])
def test_copies_of_samples_have_no_twins_among_themselves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, most_iterations: int
) -> None:
    """As many as weights say, also where an epoch has fewer sub-epochs than a weight."""
    sizes = words_and_images(9000)
    sources = (CorpusSource("a", 4000, 3.0), CorpusSource("b", 5000, 0.5))
    dealt: list[int] = []
    was = pack_epoch.Twins.deal
    monkeypatch.setattr(pack_epoch.Twins, "deal", lambda self, packs: dealt.append(self.count) or was(self, packs))
    options = replace(OPTIONS, data_parallel_size=max(4, 4000 // most_iterations))
    monkeypatch.setattr(pack_epoch, "ITERATIONS", 0.001)
    index, _ = build_index(Corpus(sizes, sources), tmp_path / "packs", options)
    times = np.bincount(index.sample_ids, minlength=len(sizes))
    assert (times[:4000] == 6).all()
    assert (times[4000:] == 1).all()
    assert len(dealt) == (6 if most_iterations == 4000 else 0)


@pytest.mark.usefixtures("small")
def test_memory_does_not_grow_with_samples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(summary_module, "MOST_PACKS", 300)
    monkeypatch.setattr(pack_epoch, "AT_ONCE", 100)
    monkeypatch.setattr(pack_epoch, "ITERATIONS", 60)
    options = replace(OPTIONS, data_parallel_size=2, seconds=0.02)
    peaks = []
    for samples in (12_000, 12_000, 96_000):  # the first compiles
        corpus = Corpus.load([folder_of(tmp_path / f"sizes-{len(peaks)}", words_and_images(samples))])
        tracemalloc.start()
        build_index(corpus, tmp_path / f"packs-{len(peaks)}", options)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 3 * peaks[1]  # what is left of each copy is packed together


@pytest.mark.usefixtures("small")
def test_spreads_of_some_iterations_are_about_those_of_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = []
    for most in (1 << 20, 1000):
        monkeypatch.setattr(summary_module, "MOST_PACKS", most)
        found.append(build_index(words_and_images(24_000), tmp_path / str(most), OPTIONS)[1])
    of_all, of_some = found
    assert of_all.spread_sizes != of_some.spread_sizes
    assert of_some.spread_sizes == pytest.approx(of_all.spread_sizes, rel=0.25)
    assert of_some.wait == of_all.wait


@pytest.mark.usefixtures("small")
def test_what_ends_early_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a half index, nor what was put to disk in between."""
    corpus = Corpus.load([folder_of(tmp_path / "sizes", words_and_images(12_000))])
    was, calls = pack_epoch.Twins.copy, []

    def ends(self: Any, number: int) -> Any:
        calls.append(number)
        if number == 2:
            raise UserError("the disk is full")
        return was(self, number)

    monkeypatch.setattr(pack_epoch.Twins, "copy", ends)
    with pytest.raises(UserError, match="full"):
        build_index(corpus, tmp_path / "packs", OPTIONS)
    assert calls == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["sizes"]


def test_large_arrays_are_read_and_written_by_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(large_arrays, "PIECE", 7)
    values = np.random.default_rng(0).integers(0, 99, (40, 3))

    def written(rows: Ints) -> Iterator[Ints]:
        yield rows[:0]
        yield rows[:13]
        yield rows[13:]

    for rows in (values, values[:, 0], values[:0]):
        np.save(tmp_path / "whole.npy", rows)
        with growing_array(tmp_path / "grown.npy") as append:
            for part in written(rows):
                append(part)
        assert (tmp_path / "grown.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    np.save(tmp_path / "whole.npy", values)
    mapped = np.load(tmp_path / "whole.npy", mmap_mode="r")
    numbers = np.array([39, 0, 7, 7, 20, 6])
    assert np.array_equal(rows_of(mapped, numbers), values[numbers])
    assert np.array_equal(np.concatenate([part for (part,) in in_pieces(mapped)]), values)
    kept = scratch((40, 3), np.int64, tmp_path)
    kept[:] = values
    large_arrays.release(kept)
    assert np.array_equal(kept, values)
    assert {path.name for path in tmp_path.iterdir()} == {"whole.npy", "grown.npy"}


def test_a_disk_without_room_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=str(tmp_path)):
        scratch((1 << 58,), np.int64, tmp_path)


def test_iterations_of_an_index_are_those_dumped(tmp_path: Path) -> None:
    index, _ = build_index(words_and_images(3000), tmp_path / "packs", OPTIONS)
    stream = PackStream(index, 4, 1)
    whole = epoch_iterations(stream)
    assert np.array_equal(np.concatenate([stream.iteration(number)[None] for number in range(len(whole))]), whole)
