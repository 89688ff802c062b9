"""tools/pack_data.py as its users run it: sizes in, index and measures out, faults in one line."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.files.records import checksums_of
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.reading.document import sealed
from omnibal_ext.sizes import Sizes
from tests.long import short
from tests.programs import refusal, tool

CONTRACT = {
    "packs", "samples", "rejected", "lower_bound_packs", "vit_budget", "llm_budget", "pad_ratio", "dist_ratio_vit",
    "dist_ratio_llm", "dist_ratio_attention", "seconds", "samples_per_second",
}  # fmt: skip
METHODS = ("balanced", "isf", "random", "length_group", "device_group")


def pack_data(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    return tool("pack_data.py", *arguments, check=check)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A dataset folder of 500 samples, of which one has too many tiles and one too many tokens."""
    generator = np.random.default_rng(0)
    tiles, tokens = generator.integers(0, 6, 500), generator.integers(20, 300, 500)
    tiles[7], tokens[9] = 40, 5000
    folder = tmp_path / "data"
    folder.mkdir()
    Sizes.from_arrays(tiles, tokens).save(folder / "sizes.npz", lines=np.arange(500) % 300 + 1)
    sources = [{"file": "a.jsonl", "samples": 300}, {"file": "b.jsonl", "samples": 200}]
    manifest = {"tile_size": 448, "tokenizer": {"sha256": "abc"}, "sources": sources}
    manifest["checksums"] = checksums_of(folder, ["sizes.npz"])
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))
    return folder


@pytest.mark.parametrize("method", short(METHODS, ("balanced", "device_group")))
def test_a_dataset_becomes_an_index_whose_dump_gives_the_printed_ratios(dataset: Path, method: str) -> None:
    out, dump = dataset.parent / "packs", dataset.parent / "iterations.npy"
    done = pack_data(
        "--data", dataset, "--method", method, "--vit-budget", 8, "--llm-budget", 1000, "--micro-batches", 2,
        "--data-parallel-size", 3, "--seed", 5, "--output-dir", out, "--dump-iterations", dump, "--json",
    )  # fmt: skip
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert set(report) >= CONTRACT
    assert (report["samples"], report["rejected"]) == (498, 2)

    index, sizes = PackedIndex.open(out), Sizes.load(dataset / "sizes.npz")
    index.verify()
    assert index.num_packs == report["packs"]
    assert index.manifest["built_from"]["data"]["manifest"]["tile_size"] == 448
    assert len((out / "rejected.jsonl").read_text().splitlines()) == 2
    iterations = np.load(dump)
    assert iterations.shape[1:] == (3, 2)
    tiles = np.vectorize(lambda pack: sizes.tiles[index.samples(pack)].sum())(iterations).sum(axis=2)
    expected = np.mean([sum(ranks.max() - ranks) / (ranks.max() * 3) for ranks in tiles])
    assert report["dist_ratio_vit"] == pytest.approx(expected)


def test_a_person_gets_a_table(dataset: Path) -> None:
    out = dataset.parent / "packs"
    done = pack_data("--data", dataset, "--vit-budget", 8, "--llm-budget", 1000, "--output-dir", out)
    for said in (
        "dist ratio llm", "Tiles of a sample", "Tokens of a sample", "Tiles of a pack", "Tokens of a pack",
        "Samples of a pack", "padding inside packs", "ranks waiting: attention", "iterations", "llm budget",
        "too many tiles", "too many tokens", "a.jsonl", "samples a second",
    ):  # fmt: skip
        assert said in done.stdout
    table = done.stdout.partition("measure (all: --json)")[2].partition("Sizes before and after")[0]
    assert sum(len(line.split()) > 1 for line in table.splitlines()) == 10
    assert "█" in done.stdout


def test_auto_budgets_are_printed_with_what_was_tried(dataset: Path) -> None:
    out, page = dataset.parent / "packs", dataset.parent / "report.html"
    common = ("--data", dataset, "--output-dir", out, "--report", page, "--oversize", "alone", "--llm-budget", 800)
    done = pack_data(*common, "--json")
    report = json.loads(done.stdout)
    assert (report["rejected"], report["samples"]) == (0, 500)
    assert report["tried"][0]["waste"] == min(trial["waste"] for trial in report["tried"])
    assert report["longest_tokens"] == 5000
    assert page.read_text().count("<svg") == 5


def test_input_files_of_a_dataset_have_weights_and_packs_of_their_own(dataset: Path) -> None:
    out = dataset.parent / "packs"
    done = pack_data(
        "--data", dataset, "--weights", 1, 3, "--separate-sources", "--vit-budget", 8, "--llm-budget", 1000,
        "--output-dir", out, "--epochs", 2, "--last-iteration", "empty", "--json",
    )  # fmt: skip
    first, second = json.loads(done.stdout)["sources"]
    assert (first["source"], first["packed"], second["source"], second["packed"]) == ("a.jsonl", 298, "b.jsonl", 600)
    index = PackedIndex.open(out)
    assert len(index.manifest["epoch_packs"]) == 2
    assert all(len(set(index.samples(pack) >= 300)) == 1 for pack in range(index.num_packs))
    rejects = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert [(row["file"], row["line"]) for row in rejects] == [("a.jsonl", 8), ("a.jsonl", 10)]


def test_packing_again_takes_options_from_an_index_and_costs_from_a_profile(dataset: Path) -> None:
    out, profile = dataset.parent / "packs", dataset.parent / "profile.json"
    first = pack_data(
        "--data", dataset, "--vit-budget", 8, "--llm-budget", 1000, "--weights", 1, 2, "--data-parallel-size", 4,
        "--micro-batches", 4, "--analytic", "a100", "--model", "internvl2-2b", "--output-dir", out, "--json",
    )  # fmt: skip
    analytic_profile(preset("internvl2-76b"), "h100", {"tiles": 8, "tokens": 1000}).save(profile)
    again = pack_data(
        "--data", dataset, "--like", out, "--costs", profile, "--output-dir", dataset.parent / "again", "--json"
    )
    old, new = PackedIndex.open(out).manifest, PackedIndex.open(dataset.parent / "again").manifest
    assert (old["costs"]["origin"], new["costs"]["origin"]) == ("internvl2-2b on a100", "internvl2-76b on h100")
    same = {"version", "packs", "samples", "sample_vit_budget", "sources", "epoch_packs", "global_batch", "one_sum"}
    assert {name: old[name] for name in same} == {name: new[name] for name in same}
    for report in map(json.loads, (first.stdout, again.stdout)):
        assert report["wait"] <= 0.02
        assert report["kinds_missing"] <= report["kinds_missing_random"] + 0.01


def test_samples_that_differ_in_a_field_share_no_pack(tmp_path: Path) -> None:
    languages = np.random.default_rng(0).choice(["de", "en", "fr"], 300).tolist()
    rows = [{"vit_num": i % 4, "token_num": 50 + i % 70, "language": name} for i, name in enumerate(languages)]
    for name, part in (("one.json", rows[:100]), ("two.json", rows[100:])):
        (tmp_path / name).write_text(json.dumps(part))
    pack_data(
        "--sizes", tmp_path / "one.json", tmp_path / "two.json", "--group-by", "language", "--output-dir",
        tmp_path / "packs", "--json",
    )  # fmt: skip
    index = PackedIndex.open(tmp_path / "packs")
    packs = [index.samples(pack) for pack in range(index.num_packs)]
    assert all(len({languages[sample] for sample in samples}) == 1 for samples in packs)
    assert any(samples.min() < 100 <= samples.max() for samples in packs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "absent.json", "--vit-budget", "8", "--llm-budget", "1000"], "absent.json"),
        (["--data", "DATA", "--vit-budget", "8", "--llm-budget", "10"], "none of 500 samples fits"),
        (
            ["--data", "DATA", "--vit-budget", "8", "--llm-budget", "1000", "--max-rejects", "1"],
            "2 samples exceed 8 tiles and 1000 tokens (the first: file a.jsonl, line 8), limit 1",
        ),
        (["--data", "DATA", "--vit-budget", "8", "--llm-budget", "1000", "--weights", "1"], "1 weights for 2 inputs"),
        (["--data", "DATA", "--vit-budget", "8", "--llm-budget", "1000", "--group-by", "task"], "no array 'task'"),
    ],
)
def test_a_users_fault_is_one_line_and_code_2(dataset: Path, arguments: list[str], message: str) -> None:
    arguments = [str(dataset) if word == "DATA" else word for word in arguments]
    assert message in refusal(pack_data(*arguments, "--output-dir", dataset.parent / "packs", check=False))
    assert not (dataset.parent / "packs").exists()
