"""docs/verdicts.md is what the results say, and no leak stands there that the second program did not find."""

import copy
import json
from typing import Any

import pytest
import torch

from benchmarks.verdicts.confirm import flash_attn_varlen_func, seen
from benchmarks.verdicts.folders import SAMPLES, samples_of, whose
from benchmarks.verdicts.page import PAGE, RESULTS, page

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
    assert "leaks (not confirmed)" in page(other)
    assert "(not confirmed)" not in page(FOUND)


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
