"""Mixed corpora: weights, groups, oversize, held-out samples and separate epochs; every sample is accounted for."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.held_out import HeldOut
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.histograms import bar_line
from omnibal_ext.packing.options import METHODS, PackOptions
from omnibal_ext.packing.pack_epoch import pack_epoch
from omnibal_ext.reading.document import sealed
from omnibal_ext.report.packing import PackingView
from omnibal_ext.report.page import report
from omnibal_ext.sizes import Sizes, sizes_files
from tests.long import short
from tests.unit.packing.corpora import corpora, drawn, samples_of
from tools import pack_data

OPTIONS = PackOptions(vit_budget=9, llm_budget=300, data_parallel_size=2, micro_batches=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus")


@settings(max_examples=40)
@given(corpora(), st.sampled_from(METHODS), st.integers(0, 3))
def test_packed_and_rejected_are_the_input(folder: Path, sizes: Sizes, method: str, seed: int) -> None:
    fits = (sizes.tiles <= 9) & (sizes.tokens <= 300)
    options, output = replace(OPTIONS, method=method, seed=seed), Path(mkdtemp(dir=folder))
    if not fits.any():
        with pytest.raises(UserError, match="none of"):
            build_index(sizes, output, options)
        return
    index, summary = build_index(sizes, output, options)
    assert np.array_equal(np.sort(index.sample_ids), np.flatnonzero(fits))
    assert summary.samples + summary.rejected == len(sizes)
    assert sum(summary.rejected_by_reason.values()) == summary.rejected
    assert len((index.folder / "rejected.jsonl").read_text().splitlines()) == summary.rejected
    assert (index.loads[:, :2] <= (index.vit_budget, index.llm_budget)).all()


def sizes_of(samples: int) -> Sizes:
    return drawn(samples, 8, (10, 290), seed=samples)


@pytest.mark.slow
@pytest.mark.parametrize("seed", short(range(3), [0]))
def test_copies_of_a_sample_share_no_pack_and_no_step(tmp_path: Path, seed: int) -> None:
    corpus = Corpus(sizes_of(600), (CorpusSource("a", 200, 3.0), CorpusSource("b", 400, 1.5)))
    index, _ = build_index(corpus, tmp_path / "index", replace(OPTIONS, seed=seed))
    stream = PackStream(index, 2, 2)
    for epoch in range(6):  # beyond the stored ones
        for step in range(stream.first_iteration(epoch), stream.first_iteration(epoch + 1) - 1):
            samples = np.concatenate([index.samples(pack) for pack in stream.iteration(step).ravel().tolist()])
            assert len(np.unique(samples)) == len(samples)


def test_every_sub_epoch_has_the_mix_of_the_epoch() -> None:
    corpus = Corpus(sizes_of(900), (CorpusSource("a", 300, 2.0), CorpusSource("b", 600, 1.0)))
    parts = corpus.epoch_samples(0, 0, np.ones(900, np.bool_), 8)
    assert [np.count_nonzero(part < 300) for part in parts] == [300, 300]
    assert [np.count_nonzero(part >= 300) for part in parts] == [300, 300]


def test_weights_that_leave_no_sample_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="epoch 0 has no samples"):
        build_index(Corpus(sizes_of(2), (CorpusSource("a", 2, 0.1),)), tmp_path / "index", OPTIONS)


def test_equal_values_are_one_group_wherever_they_stand(tmp_path: Path) -> None:
    values = ["chart", None, 3, "chart", 3, None, "3"] * 20
    corpus = Corpus.of(sizes_of(140)).grouped(values)
    index, _ = build_index(corpus, tmp_path / "index", OPTIONS)
    assert sorted(index.sample_ids.tolist()) == list(range(140))
    for pack in range(index.num_packs):
        assert len({str(values[sample]) for sample in index.samples(pack)}) == 1


def test_a_dataset_is_a_corpus_of_its_input_files(tmp_path: Path) -> None:
    sources = [{"file": "a.jsonl", "samples": 2, "rejected": 1}, {"file": "b.jsonl", "samples": 1, "rejected": 0}]
    (tmp_path / "manifest.json").write_text(json.dumps(sealed({"sources": sources})))
    Sizes.from_arrays([1, 2, 3], [10, 20, 30]).save(tmp_path / "sizes.npz", lines=np.array([1, 3, 1]))
    corpus = Corpus.of_dataset(tmp_path).weighted([1.0, 2.0])
    assert corpus.sources == (CorpusSource("a.jsonl", 2, 1.0), CorpusSource("b.jsonl", 1, 2.0))
    assert [corpus.origin_of(i) for i in range(3)] == [
        {"file": "a.jsonl", "line": 1}, {"file": "a.jsonl", "line": 3}, {"file": "b.jsonl", "line": 1}
    ]  # fmt: skip
    (tmp_path / "manifest.json").write_text(json.dumps(sealed({})))
    with pytest.raises(UserError, match="field 'sources' is missing; preprocess again"):
        Corpus.of_dataset(tmp_path)


def test_an_oversize_sample_is_kept_alone_if_asked(tmp_path: Path) -> None:
    sizes = Sizes.from_arrays([1, 30, 2, 1], [100, 50, 100, 4000])
    index, summary = build_index(sizes, tmp_path / "index", replace(OPTIONS, oversize="alone"))
    packs = [index.samples(pack).tolist() for pack in range(index.num_packs)]
    assert [1] in packs
    assert [3] in packs
    assert (summary.rejected, index.vit_budget, index.llm_budget) == (0, 30, 4000)
    assert (index.folder / "rejected.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("corpus", "message"),
    [
        (lambda: Corpus(sizes_of(10), (CorpusSource("a", 9),)), "9 samples"),
        (lambda: Corpus(sizes_of(10), (CorpusSource("a", 10, 0.0),)), "weight 0.0"),
        (lambda: Corpus(sizes_of(10), (CorpusSource("a", 10),), np.zeros(9, int)), "groups"),
        (lambda: Corpus.of(sizes_of(10)).grouped("abc"), "groups"),
        (lambda: Corpus.of(sizes_of(10)).weighted([1.0, 2.0]), "2 weights for 1 inputs"),
        (lambda: PackOptions("best", 1, 1), "--method best"),
        (lambda: PackOptions(vit_budget=1, llm_budget=1, oversize="cut"), "--oversize cut"),
        (lambda: PackOptions(vit_budget=1, llm_budget=1, epochs=0), "--epochs 0"),
    ],
)
def test_a_wrong_corpus_or_option_is_named(corpus: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        corpus()  # type: ignore[operator]


def test_the_report_draws_what_was_packed(tmp_path: Path) -> None:
    corpus = Corpus(sizes_of(80), (CorpusSource("<a&b>", 80),))
    index, summary = build_index(corpus, tmp_path / "index", OPTIONS)
    page = report([], [PackingView.of_summary(index, corpus, summary, [])])
    assert page.count("<figure>") == 5
    assert "&lt;a&amp;b&gt;" in page
    assert "<a&b>" not in page
    for said in ("Waste by kind", "ranks waiting: attention", "tokens per rank", "Left out"):
        assert said in page


def test_a_line_of_bars_shows_where_values_lie() -> None:
    bars = bar_line(np.repeat([0, 12, 23], [8, 1, 4]))
    assert bars == "█" + " " * 11 + "▁" + " " * 10 + "▄"
    assert bar_line(np.array([5, 5])).strip() == "█"


def test_a_file_that_names_the_sizes_files_of_its_sets_stands_for_them(tmp_path: Path) -> None:
    """As the script of OmniBal's authors reads: paths start from that file's folder, other sets are passed over."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text('[{"vit_num": 1, "token_num": 9, "image_flag": 0}]')
    sets = {"a": {"token_lengths": "./a.json"}, "chat": {"root": "x"}, "b": {"token_lengths": str(tmp_path / "b.json")}}
    (tmp_path / "meta.json").write_text(json.dumps(sets))
    files = sizes_files([tmp_path / "meta.json", tmp_path / "c.npz"])
    assert files == [tmp_path / "a.json", tmp_path / "b.json", tmp_path / "c.npz"]
    (tmp_path / "meta.json").write_text('{"chat": {"root": "x"}}')
    with pytest.raises(UserError, match=r"meta\.json: no set in it names its token_lengths"):
        sizes_files([tmp_path / "meta.json"])


@pytest.mark.parametrize("seed", range(2))
def test_copies_of_a_sample_and_groups_share_no_pack(seed: int) -> None:
    """Every sample four times in an epoch of one part; two groups that may not share packs."""
    generator = np.random.default_rng(seed)
    sizes = Sizes.from_arrays(generator.integers(0, 3, 200), generator.integers(50, 120, 200))
    groups = generator.integers(0, 2, 200)
    corpus = Corpus(sizes, (CorpusSource("all", 200, 4.0),), groups)
    options = PackOptions(vit_budget=12, llm_budget=600, data_parallel_size=4, micro_batches=12, seed=seed)
    packs = pack_epoch(corpus, np.zeros(200, np.int8), options, PackCosts.of_model(), 0).packs
    assert np.array_equal(np.bincount(packs.sample_ids), np.full(200, 4))
    for held in samples_of(packs):
        assert len(np.unique(held)) == len(held)
        assert len(np.unique(groups[held])) == 1


IN_STEPS = PackOptions(vit_budget=9, llm_budget=300, data_parallel_size=2, micro_batches=2, last_iteration="empty")


def weighted(count: int = 200, weights: tuple[float, float] = (1.0, 1.0)) -> Corpus:
    sizes, first = drawn(count, 11, (10, 290), seed=count), count // 3
    return Corpus(sizes, (CorpusSource("a", first, weights[0]), CorpusSource("b", count - first, weights[1])))


@pytest.mark.parametrize("weights", [(1.0, 1.0), (2.0, 0.5)])
@pytest.mark.parametrize("oversize", ["reject", "alone"])
def test_what_is_held_out_and_the_rest_are_the_corpus(
    tmp_path: Path, weights: tuple[float, float], oversize: str
) -> None:
    """Weights say how often the rest is trained on; an evaluation has each sample once."""
    whole, options = weighted(weights=weights), replace(IN_STEPS, oversize=oversize)
    fits = (whole.sizes.tiles <= 9) | (oversize == "alone")
    drawn = HeldOut(0.1, 7).draw(200)
    assert drawn.sum() == 20
    rest, rest_summary = build_index(HeldOut(0.1, 7).of(whole), tmp_path / "rest", options)
    held, held_summary = build_index(HeldOut(0.1, 7, packed=True).of(whole), tmp_path / "held", options)
    assert Counter(held.sample_ids.tolist()) == Counter(np.flatnonzero(drawn & fits).tolist())
    assert set(rest.sample_ids.tolist()) == set(np.flatnonzero(~drawn & fits).tolist())
    assert rest_summary.rejected == np.count_nonzero(~drawn & ~fits)
    assert held_summary.rejected == np.count_nonzero(drawn & ~fits)


def test_the_draw_is_by_seed_and_of_the_share(tmp_path: Path) -> None:
    draws = [HeldOut(0.25, seed).draw(1000) for seed in range(40)]
    assert {int(drawn.sum()) for drawn in draws} == {250}
    often = np.sum(draws, axis=0)
    assert often.min() > 0
    assert often.max() < 25, "no sample is preferred"
    assert np.array_equal(HeldOut(0.25, 3).draw(1000), draws[3])


@pytest.mark.parametrize(("share", "count"), [(0.02, 20), (0.99, 20), (0.5, 0)])
def test_a_share_that_leaves_nothing_is_refused(share: float, count: int) -> None:
    with pytest.raises(UserError, match="must be 1 or more, and leave some"):
        HeldOut(share, 0).draw(count)


def packed(monkeypatch: pytest.MonkeyPatch, *words: object) -> None:
    monkeypatch.setattr("sys.argv", ["pack_data", *map(str, words), "--json"])
    pack_data.main()


def test_the_tool_packs_what_an_index_left_out_within_its_budgets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = weighted().sizes
    np.savez(tmp_path / "sizes.npz", tiles=sizes.tiles, tokens=sizes.tokens)
    common = ("--sizes", tmp_path / "sizes.npz")
    how = ("--vit-budget", 12, "--llm-budget", 400, "--micro-batches", 2, "--seed", 5, "--weights", 2)
    packed(monkeypatch, *common, *how, "--held-out", 0.1, "--output-dir", tmp_path / "rest")
    packed(monkeypatch, *common, "--held-out-of", tmp_path / "rest", "--output-dir", tmp_path / "held")
    packed(monkeypatch, *common, "--like", tmp_path / "rest", "--wait", 0.01, "--output-dir", tmp_path / "again")
    rest, held, again = (pack_data.PackedIndex.open(tmp_path / name) for name in ("rest", "held", "again"))
    assert (held.vit_budget, held.llm_budget, held.global_batch) == (12, 400, 2)
    drawn = np.flatnonzero(HeldOut(0.1, 5).draw(200)).tolist()
    assert sorted(held.sample_ids.tolist()) == drawn
    assert sorted(again.sample_ids.tolist()) == sorted(rest.sample_ids.tolist())
    assert Counter(rest.sample_ids.tolist()) == Counter({n: 2 for n in range(200) if n not in drawn})
    for wrong in ("held", "plain"):
        packed(monkeypatch, *common, *how, "--output-dir", tmp_path / "plain")
        with pytest.raises(UserError, match="leaves no samples out; pack it with --held-out SHARE"):
            packed(monkeypatch, *common, "--held-out-of", tmp_path / wrong, "--output-dir", tmp_path / "x")
