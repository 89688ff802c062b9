"""What tools/pack_data.py prints of an index, reckoned once more from the files of the index and the sizes.

What orders teach has tests of its own (`ELSEWHERE`); no figure is without one.
"""

import json
import re
import time
from collections import Counter
from dataclasses import fields, replace
from fractions import Fraction
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.event import trigger_event

from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.histograms import distributions, waste_by_kind
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.summary import BOUND, HELPS, MISSING, RANDOM, TOO_LONG, Summary, shortfalls
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.spread import pack_features
from omnibal_ext.packing.pack_epoch import Epoch, pack_epoch
from omnibal_ext.packing.packs import LoadedPacks, PackList, pack_loads
from omnibal_ext.sizes import Sizes

COSTS = PackCosts({"vision": {"tiles": 3.0, "pack": 2.0}, "language": {"tokens": 0.1, "attention": 1e-4, "pack": 1.0}})
ELSEWHERE = ("spread_sizes", "spread_sources", "spread_most", "kinds_missing", "kinds_missing_random", "further")
"""test_order_iterations.py, test_mel_frames.py."""


def a_corpus(seed: int) -> Corpus:
    random = np.random.default_rng(seed)
    tiles, tokens = random.integers(0, 6, 150), random.integers(20, 200, 150)
    tiles[[3, 77]], tokens[[5, 78, 79]] = 40, 900
    return Corpus(Sizes.from_arrays(tiles, tokens), (CorpusSource("a.jsonl", 90), CorpusSource("b.jsonl", 60, 0.5)))


def reckoned(folder: Path, corpus: Corpus, iterations: np.ndarray, one_sum: bool) -> dict[str, Any]:
    """Every figure from the files and the sizes alone; `iterations` [I, D, M] the packs that ranks run."""
    manifest = json.loads((folder / "manifest.json").read_text())
    offsets, ids = np.load(folder / "pack_offsets.npy"), np.load(folder / "sample_ids.npy")
    count, pad = manifest["epoch_packs"][0], manifest["pad"]
    packs = [ids[a:b].tolist() for a, b in pairwise(offsets)]
    tiles, tokens = corpus.sizes.tiles.tolist(), corpus.sizes.tokens.tolist()

    def load(pack: int) -> tuple[int, int, int]:
        if pack < 0:
            return 0, 0, 0
        lengths = [tokens[sample] for sample in packs[pack]]
        lengths = [max(lengths)] * len(lengths) if pad else lengths
        return sum(tiles[sample] for sample in packs[pack]), sum(lengths), sum(n * n for n in lengths)

    def seconds(pack: int) -> list[float]:
        t, n, square = load(pack)
        parts = [3.0 * t + 2.0 * (t > 0), 0.1 * n + 1e-4 * square + 1.0 * (n > 0)]
        return [sum(parts)] if one_sum else parts

    def ratio(column: int) -> float:
        found = []
        for ranks in iterations.tolist():
            work = [sum(load(pack)[column] for pack in of_rank) for of_rank in ranks]
            found.append(sum(max(work) - one for one in work) / (max(work) * len(work)) if max(work) else 0.0)
        return sum(found) / len(found)

    each: list[tuple[float, float]] = []  # of an iteration: what its parts take, and what ranks work in them
    for ranks in iterations.tolist():
        parts = [[sum(part) for part in zip(*map(seconds, of_rank), strict=True)] for of_rank in ranks]
        each.append((sum(max(part) for part in zip(*parts, strict=True)), sum(map(sum, parts)) / len(ranks)))
    busy, worked = map(sum, zip(*each, strict=True))
    first = [sample for pack in packs[:count] for sample in pack]
    seen = Counter(first)
    rejects = [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]
    sources = [
        {"source": name, "weight": weight, "samples": len(rows), "text_only": sum(tiles[row] == 0 for row in rows),
         "rejected": sum(line["sample"] in rows for line in rejects), "packed": sum(seen[row] for row in rows),
         "tiles": sum(seen[row] * tiles[row] for row in rows), "tokens": sum(seen[row] * tokens[row] for row in rows)}
        for name, weight, rows in (("a.jsonl", 1.0, range(90)), ("b.jsonl", 0.5, range(90, 150)))
    ]  # fmt: skip
    bound = max(
        ceil(Fraction(sum(tiles[sample] for sample in first), manifest["vit_budget"])),
        ceil(Fraction(sum(tokens[sample] for sample in first), manifest["llm_budget"])),
    )
    padded = [1 - sum(tokens[s] for s in pack) / (max(tokens[s] for s in pack) * len(pack)) for pack in packs[:count]]
    return {
        "packs": count, "samples": len(first), "rejected": len(rejects), "lower_bound_packs": bound,
        "vit_budget": manifest["vit_budget"], "llm_budget": manifest["llm_budget"],
        "pad_ratio": sum(padded) / count if pad else 0.0,
        "dist_ratio_vit": ratio(0), "dist_ratio_llm": ratio(1), "dist_ratio_attention": ratio(2),
        "iterations": len(iterations), "filled_packs": iterations.size - count, "seats": count,
        "tokens_in_wide_packs": 0.0, "tokens_exchanged": 0.0,
        "tokens_per_rank": sum(tokens[sample] for sample in first) / len(iterations) / 3,
        "samples_per_pack": len(first) / count,
        "longest_tiles": max(load(pack)[0] for pack in range(count)),
        "longest_tokens": max(load(pack)[1] for pack in range(count)),
        "wait": 1 - worked / busy, "wait_last": 1 - each[-1][1] / each[-1][0],
        "rejected_by_reason": dict(Counter(line["reason"] for line in rejects)), "sources": sources,
    }  # fmt: skip


@pytest.mark.parametrize("last_iteration", ["next_epoch", "empty"])
@pytest.mark.parametrize(("method", "pipeline", "seed"), [("balanced", 2, 0), ("isf", 1, 1), ("random", 2, 2)])
def test_every_figure_is_that_of_the_files(
    method: str, pipeline: int, seed: int, last_iteration: str, tmp_path: Path
) -> None:
    corpus = a_corpus(seed)
    options = PackOptions(
        method, 9, 400, micro_batches=2, data_parallel_size=3, seed=seed, last_iteration=last_iteration,
        pipeline_model_parallel_size=pipeline,
    )  # fmt: skip
    index, summary = build_index(corpus, tmp_path / "index", options, costs=COSTS)
    stream = PackStream(PackedIndex.open(tmp_path / "index"), 3, 2)
    iterations = np.stack([stream.iteration(number) for number in range(stream.iterations_per_epoch)])
    expected = reckoned(index.folder, corpus, iterations, one_sum=pipeline == 1)
    for name, value in expected.items():
        found = getattr(summary, name)
        assert found == (pytest.approx(value) if isinstance(value, float) else value), name
    assert summary.samples_per_second == pytest.approx(len(index.sample_ids) / summary.seconds)
    waste = dict(waste_by_kind(summary))
    first = index.sample_ids[: index.pack_offsets[summary.packs]]
    room = {"tiles": summary.packs * index.vit_budget, "tokens": summary.packs * index.llm_budget}
    for name, size in (("tiles", corpus.sizes.tiles), ("tokens", corpus.sizes.tokens)):
        assert waste[f"{name} of the budget unused"] == pytest.approx(1 - int(size[first].sum()) / room[name])
    assert waste["padding inside packs"] == summary.pad_ratio
    for name, kind in (("ViT", "vit"), ("LLM", "llm"), ("attention", "attention")):
        assert waste[f"ranks waiting: {name}"] == getattr(summary, f"dist_ratio_{kind}")
    for (_, values), least in zip(distributions(index, corpus, summary), (0, 1, 0, 1, 1), strict=True):
        assert values.min() >= least
    assert sum(distributions(index, corpus, summary)[4][1]) == summary.samples
    timed = {"seconds", "samples_per_second", "compile_seconds"}
    assert set(expected) | timed | {*ELSEWHERE} == {field.name for field in fields(Summary)}
    if last_iteration == "empty":
        assert (iterations < 0).sum() == summary.filled_packs


def test_what_numba_compiles_is_no_time_of_packing(tmp_path: Path) -> None:
    """It is once on a machine: the next pack of the same corpus would be so much faster."""

    def compiling(*arguments: Any) -> Any:
        with trigger_event("numba:compile"):
            time.sleep(1.0)
        return pack_epoch(*arguments)

    begin, options = time.perf_counter(), PackOptions("isf", 9, 400)
    index, summary = build_index(a_corpus(0), tmp_path / "index", options, costs=COSTS, packer=compiling)
    whole = time.perf_counter() - begin
    assert summary.compile_seconds >= 1.0
    assert summary.seconds <= whole - 1.0
    assert summary.samples_per_second == pytest.approx(len(index.sample_ids) / summary.seconds)


def test_what_a_packer_of_ones_own_leaves_out_is_not_counted(tmp_path: Path) -> None:
    def halved(*arguments: Any) -> Epoch:
        packs = pack_epoch(*arguments).packs
        packs = packs.between(0, len(packs) // 2)
        return Epoch([LoadedPacks(packs, pack_loads(packs, arguments[0].sizes))], [len(packs)])

    corpus = a_corpus(0)
    corpus = corpus.weighted([1.0] * len(corpus.sources))
    index, summary = build_index(corpus, tmp_path / "index", PackOptions("isf", 9, 400), costs=COSTS, packer=halved)
    held = np.asarray(index.sample_ids)
    assert sum(source["packed"] for source in summary.sources) == summary.samples == len(held) < len(corpus.sizes)
    assert sum(source["tokens"] for source in summary.sources) == corpus.sizes.tokens[held].sum()
    assert summary.lower_bound_packs <= summary.packs


@pytest.mark.parametrize("weight", [0.04, 0.06, 0.25, 1.04, 2.5])
def test_a_source_is_seen_as_often_as_its_weight_says(weight: float, tmp_path: Path) -> None:
    """However small: of 1,000 samples .04 are forty in each epoch, others each time until all have come round."""
    sizes = Sizes.from_arrays(np.ones(1100, np.int64), np.full(1100, 50))
    corpus = Corpus(sizes, (CorpusSource("large", 1000, weight), CorpusSource("small", 100)))
    packed = np.ones(1100, dtype=bool)
    seen: Counter[int] = Counter()
    for epoch in range(8):
        parts = corpus.epoch_samples(epoch, 0, packed, 8)
        samples = np.concatenate(parts)
        assert (samples < 1000).sum() == round(1000 * weight)
        assert (samples >= 1000).sum() == 100
        seen.update(samples[samples < 1000].tolist())
    times = [seen[sample] for sample in range(1000)]
    assert max(times) - min(times) <= 1
    index, summary = build_index(corpus, tmp_path / "index", PackOptions("isf", 9, 400, epochs=1))
    assert summary.sources[0]["packed"] == round(1000 * weight)
    assert summary.sources[0]["weight"] == index.manifest["sources"][0]["weight"] == weight


OPTIONS = PackOptions(vit_budget=8, llm_budget=4096, data_parallel_size=8, wait=0.004)
FINE = replace(
    Summary(**{field.name: 0 for field in fields(Summary) if field.name != "further"}),  # type: ignore[arg-type]
    iterations=20, wait=TOO_LONG * 0.004, spread_sizes=RANDOM, spread_sources=RANDOM, kinds_missing=0.3 + MISSING,
    kinds_missing_random=0.3, spread_most="attention",
)  # fmt: skip


@pytest.mark.parametrize(
    ("beyond", "words"),
    [
        ({"wait": 0.00409, "wait_last": 0.0123}, "ranks wait for 0.0041 of the time, more than --wait 0.004 .* 0.0123"),
        ({"spread_sizes": 1.11}, "1.11 times as much in sizes and 1.10 in sources .*, most in attention"),
        ({"spread_sources": 1.12}, "1.10 times as much in sizes and 1.12 in sources"),
        ({"kinds_missing": 0.32}, r"32.0% of iterations .* \(in a random order 30.0%\)"),
    ],
)
def test_what_an_index_falls_short_of_is_said_beyond_a_limit(beyond: dict[str, float], words: str) -> None:
    """And not at it."""
    assert shortfalls(FINE, OPTIONS) == []
    said, helps = shortfalls(replace(FINE, **beyond), OPTIONS)
    assert helps == HELPS
    assert re.search(words, said)
    assert shortfalls(replace(FINE, **beyond), replace(OPTIONS, method="isf")) == []
    assert shortfalls(replace(FINE, **beyond, iterations=1), OPTIONS) == []


def test_advice_names_a_larger_wait_only_where_that_helps() -> None:
    """With one microbatch dear packs bound the wait; with several the last iteration may."""
    far = replace(FINE, wait=0.0081)
    assert shortfalls(far, OPTIONS)[-1] == BOUND
    assert shortfalls(replace(far, wait=0.0079), OPTIONS)[-1] == HELPS
    assert shortfalls(far, replace(OPTIONS, micro_batches=4))[-1] == HELPS


def test_what_differs_most_is_named(tmp_path: Path) -> None:
    """Packs of one cost hold equally many tokens: text-only samples, or the source of long ones, are apart."""
    tiles = np.repeat([0, 4], 400)
    sizes = Sizes.from_arrays(tiles, np.where(tiles > 0, 900, 100))
    _, summary = build_index(sizes, tmp_path / "one", replace(OPTIONS, wait=1e-6))
    assert summary.spread_most in ("tiles", "tokens", "attention", "text-only samples")
    corpus = Corpus(
        Sizes.from_arrays(tiles // 4, np.full(800, 100)), (CorpusSource("few", 400), CorpusSource("b", 400))
    )
    packs = PackList(np.arange(0, 801, 10), np.arange(800))
    features = pack_features(corpus, packs, pack_loads(packs, corpus.sizes))
    assert features.names == ["text-only samples", "few", "b"]
    assert len(features.names) + 3 == features.values.shape[1]
