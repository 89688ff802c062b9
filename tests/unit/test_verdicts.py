"""docs/verdicts.md is what the results say, no leak stands there that the second program did not find, and no
transformers that a trainer does not ask for."""

import copy
import json
import re
from typing import Any

import pytest
import torch
from packaging.specifiers import SpecifierSet

from benchmarks.verdicts.confirm import flash_attn_varlen_func, seen
from benchmarks.verdicts.folders import KINDS, SAMPLES, samples_of, whose
from benchmarks.verdicts.page import PAGE, RESULTS, cell, page, summary

FOUND: dict[str, Any] = json.loads(RESULTS.read_text())


def test_the_page_is_made_of_the_results() -> None:
    assert PAGE.read_text() == page(FOUND)


def test_every_leak_is_one_that_the_second_program_finds_sample_for_sample() -> None:
    for row in FOUND["rows"]:
        for kernel, said in row["kernels"].items():
            leaks = said.startswith("leaks")
            assert not leaks or row["confirmed"][kernel] == row["sees"][kernel] != [[]] * SAMPLES, row


def test_a_leak_that_is_not_confirmed_is_said_to_be_none() -> None:
    other = copy.deepcopy(FOUND)
    leak = next(row for row in other["rows"] if "leaks" in row["kernels"].values())
    leak["confirmed"] = dict.fromkeys(leak["confirmed"], [[]] * SAMPLES)
    assert "leaks (not confirmed" in page(other)
    assert "(not confirmed" not in page(FOUND)


def test_every_row_was_run_with_a_transformers_that_the_trainer_asks_for() -> None:
    assert [row for row in FOUND["rows"] if row["transformers"] not in SpecifierSet(row["asks"])] == []


def test_a_leak_says_what_the_trainer_says_against_the_setting() -> None:
    against = [
        (row, kernel, why) for row in FOUND["rows"] for kernel, why in row["against"].items()
        if row["kernels"][kernel].startswith("leaks")
    ]  # fmt: skip
    assert {row["trainer"] for row, _, _ in against} == {"trl", "axolotl"}
    for row, kernel, why in against:
        assert cell(row, kernel, {}) == f"leaks (confirmed; {why})"


def test_the_summary_is_every_verdict_of_the_newest_versions() -> None:
    """Its cells, taken apart: each way, samples, folder and kernel has the word of its row, and there is no other."""
    newest: dict[str, list[int]] = {}
    for row in FOUND["rows"]:
        newest[row["trainer"]] = max(newest.get(row["trainer"], [0]), _parts(row["version"]))
    expected = {
        (f"{row['trainer']} {row['version']}, {row['says']}", row["samples"], row["folder"], kernel):
            ", ".join(filter(None, (re.sub("^runs", "fails", said.partition(":")[0]),
                                    said.startswith("leaks") and row["against"].get(kernel))))
        for row in FOUND["rows"] if _parts(row["version"]) == newest[row["trainer"]]
        for kernel, said in row["kernels"].items()
    }  # fmt: skip
    lines = [line[2:-2].split(" | ") for line in summary(FOUND["rows"]).splitlines()[2:]]
    found = {
        (way, samples, folder, kernel): said
        for way, *cells in lines
        for samples, cell in zip(("images", "words"), cells, strict=True)
        for said, folders, kernels in re.findall(r"([^:>]+): ([a-z, ]+?)(?: \((.+?)\))?(?:<|$)", cell)
        for folder in (KINDS if folders == "all" else folders.split(", "))
        for kernel in (kernels.split(", ") if kernels else ("eager", "sdpa", "flash"))
    }
    assert found == expected


def _parts(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


@pytest.mark.parametrize("sees", [[], [(1, 0)], [(3, 1), (0, 2)]])
def test_who_sees_whom_is_found_by_changing_one(sees: list[tuple[int, int]]) -> None:
    """A model whose logits are a token's own number, and that of a sample which it sees."""

    class Model:
        def __call__(self, input_ids: torch.Tensor) -> Any:
            logits = input_ids.float()[0]
            for who, whom in sees:
                own = (input_ids[0] // 20) == who
                logits = logits + own * input_ids[0][input_ids[0] // 20 == whom].float().mean()
            return type("Out", (), {"logits": logits[None, :, None]})

    made = [samples_of("llava", False, changed) for changed in (None, *range(SAMPLES))]
    batches = [{"input_ids": torch.cat([one["input_ids"] for one in samples])[None]} for samples in made]
    assert seen(Model(), batches) == [sorted(whom for who, whom in sees if who == one) for one in range(SAMPLES)]


@pytest.mark.parametrize("changed", [None, *range(SAMPLES)])
def test_a_sample_is_known_by_its_words(changed: int | None) -> None:
    for number, one in enumerate(samples_of("qwen", True, changed)):
        assert whose(one["input_ids"].tolist()) == (number, number == changed)


@pytest.mark.parametrize("causal", [True, False])
def test_the_second_flash_attention_keeps_sequences_apart(causal: bool) -> None:
    """Against softmax written out, a mask over all tokens."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 8, generator=draw) for heads in (4, 2, 2))
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    found = flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=causal)
    sequence, place = torch.tensor([0] * 4 + [1] * 5), torch.arange(9)
    apart = (sequence[:, None] != sequence) | (causal & (place[:, None] < place))
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(2, 1)) / 8**0.5
    chances = scores.masked_fill(apart, float("-inf")).softmax(-1)
    torch.testing.assert_close(found, torch.einsum("hqk,khd->qhd", chances, v.repeat_interleave(2, 1)))
