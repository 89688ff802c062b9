"""Why a sample is in its pack: an index says where it is, where that runs, and what is left."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus, CorpusSource
from omnibal_ext.packing.held_out import HeldOut
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.why import why
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.sizes import Sizes
from tests.long import short
from tests.programs import tool

COUNTS = (90, 40)
OPTIONS = PackOptions(vit_budget=20, llm_budget=100, data_parallel_size=4, micro_batches=2, widths=(1, 2), epochs=2)


def corpus_of(seed: int) -> Corpus:
    """Two sources of small samples; one sample needs two ranks, the last fits none."""
    generator = np.random.default_rng(seed)
    tiles, tokens = generator.integers(0, 9, sum(COUNTS)), generator.integers(1, 90, sum(COUNTS))
    tokens[[3, -1]] = 150, 900
    sources = tuple(CorpusSource(f"{name}/chat.json", count) for name, count in zip("ab", COUNTS, strict=True))
    return Corpus(Sizes.from_arrays(tiles, tokens), sources)


def index_of(corpus: Corpus, folder: Path, options: PackOptions = OPTIONS) -> PackedIndex:
    return build_index(corpus, folder / "packs", options)[0]


@pytest.mark.parametrize("seed", short([0, 1], [0]))
@pytest.mark.parametrize("widths", [(1,), (1, 2)])
def test_every_sample_is_where_the_stream_of_packs_runs_it(tmp_path: Path, seed: int, widths: tuple[int, ...]) -> None:
    corpus = corpus_of(seed).weighted([2.0, 1.0])
    index = index_of(corpus, tmp_path, replace(OPTIONS, widths=widths))
    stream = PackStream(index, 4, 2)
    for sample in range(sum(COUNTS)):
        answer = why(index, str(sample), corpus.sizes)
        assert answer.sizes == {"tiles": corpus.sizes.tiles[sample], "tokens": corpus.sizes.tokens[sample]}
        times = np.count_nonzero(index.sample_ids == sample)
        assert sum(placed.samples.count(sample) for placed in answer.packs) == times
        assert bool(answer.left_out) == (times == 0)
        for placed in answer.packs:
            slots = stream.iteration(placed.iteration)
            assert (slots[list(placed.ranks), placed.micro_batch] == placed.pack).all()
            assert np.count_nonzero(slots == placed.pack) == len(placed.ranks) == index.width(placed.pack)
            assert placed.loads["tokens"] == corpus.sizes.tokens[placed.samples].sum()
            for size, load, budget in placed.used:
                assert 0 <= load <= budget == len(placed.ranks) * {"tiles": 20, "tokens": 100}[size]


def test_what_fills_a_pack_and_why_it_is_not_narrower_is_said(tmp_path: Path) -> None:
    index = index_of(corpus_of(0), tmp_path)
    (placed, *_) = why(index, "3").packs
    load = placed.loads["tokens"]
    assert placed.reasons == [
        f"tokens fill it most: {load} of 200, which leaves {200 - load}",
        "on 1 rank at most 100 tokens run together",
    ]
    assert why(index, "129").left_out.startswith("too many tokens: ")


def test_a_sample_beyond_its_budget_is_alone_because_that_was_asked_for(tmp_path: Path) -> None:
    index = index_of(corpus_of(0), tmp_path, replace(OPTIONS, oversize="alone", widths=(1,), epochs=1))
    (placed,) = why(index, "129").packs
    assert placed.samples == [129]
    assert placed.reasons == ["over its budget, 900 tokens of 100: alone, by --oversize alone"]


def test_samples_are_named_by_source_and_row_too(tmp_path: Path) -> None:
    index = index_of(corpus_of(0), tmp_path)
    answer = why(index, "b/chat.json:5")
    assert (answer.sample, answer.source, answer.row) == (95, "b/chat.json", 5)
    assert why(index, "95").to_record() == answer.to_record()
    for unknown in ("130", "-1", "b/chat.json:40", "c:1", "x"):
        with pytest.raises(UserError, match=r"no such sample; give a number below 130, or SOURCE:ROW of a/chat.json"):
            why(index, unknown)
    with pytest.raises(UserError, match="has several"):
        why(index, "chat.json:5")


def test_held_out_and_undrawn_samples_say_so(tmp_path: Path) -> None:
    held_out, corpus = HeldOut(0.2, 7), corpus_of(0)
    drawn = held_out.draw(sum(COUNTS))
    built_from = {"held_out": held_out.to_record()}
    index = build_index(held_out.of(corpus), tmp_path / "held", OPTIONS, built_from)[0]
    said = {why(index, str(sample)).left_out for sample in np.flatnonzero(drawn[:-1])}
    assert said == {"held out, by --held-out"}
    index = index_of(corpus.weighted([0.1, 1.0]), tmp_path)
    undrawn = np.setdiff1d(np.arange(COUNTS[0]), index.sample_ids)
    assert "below 1" in why(index, str(undrawn[0])).left_out


def test_the_tool_answers_from_the_index_alone_and_draws_the_pack(tmp_path: Path) -> None:
    index_of(corpus_of(0), tmp_path)
    words = ("--why", 3, "--output-dir", tmp_path / "packs", "--report", tmp_path / "pack.html", "--json")
    done = tool("pack_data.py", *words)
    said = json.loads(done.stdout)
    assert (said["sample"], said["sizes"], len(said["packs"][0]["ranks"])) == (3, {}, 2)
    assert 3 in said["packs"][0]["samples"]
    page = (tmp_path / "pack.html").read_text()
    assert f"Pack {said['packs'][0]['pack']}, of" in page
    assert said["packs"][0]["reasons"][1] in page
