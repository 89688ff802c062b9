"""The stand-in of flash-attention gives each token what a loop over the keys that it may see gives it."""

import math
from typing import Any

import pytest
import torch

from megatron.vlm.prove.models import attention, flash_attn_func, flash_attn_varlen_func
from tests.unit.prove.folders import model_of

WAYS: list[dict[str, Any]] = [
    {"causal": True},
    {"causal": False},
    {"causal": True, "window_size": (2, 2)},
    {"causal": False, "window_size": (1, 2)},
    {"causal": True, "softcap": 0.7, "softmax_scale": 1.3},
]


def attended(q: Any, k: Any, v: Any, token: int, keys: list[int], how: dict[str, Any]) -> torch.Tensor:
    heads = []
    for head in range(q.shape[1]):
        group = head // (q.shape[1] // k.shape[1])
        scores = [float(q[token, head] @ k[key, group]) * how.get("softmax_scale", q.shape[-1] ** -0.5) for key in keys]
        cap = how.get("softcap")
        scores = [cap * math.tanh(score / cap) for score in scores] if cap else scores
        weights = [math.exp(score) for score in scores]
        parts = [weight / sum(weights) * v[key, group] for weight, key in zip(weights, keys, strict=True)]
        heads.append(torch.stack(parts).sum(0))
    return torch.stack(heads)


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_token_sees_the_keys_of_its_own_sequence(how: dict[str, Any]) -> None:
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(12, heads, 8, generator=draw) for heads in (4, 2, 2))
    ends = [0, 5, 6, 10]  # and two tokens of no sequence
    bounds = torch.tensor(ends, dtype=torch.int32)
    found = flash_attn_varlen_func(q, k, v, bounds, bounds, 5, 5, **how)
    before, after = how.get("window_size", (12, 12))
    for token in range(10):
        begin, end = max(one for one in ends if one <= token), min(one for one in ends if one > token)
        last = token if how["causal"] else min(end - 1, token + after)
        keys = [*range(max(begin, token - before), last + 1)]
        assert torch.allclose(found[token], attended(q, k, v, token, keys, how), atol=1e-5)
    assert not found[10:].any()


def test_rows_of_a_batch_are_sequences() -> None:
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(3, 4, 2, 8, generator=draw) for _ in range(3))
    ends, flat = torch.tensor([0, 4, 8, 12], dtype=torch.int32), [one.flatten(0, 1) for one in (q, k, v)]
    wanted = flash_attn_varlen_func(*flat, ends, ends, causal=True)
    assert torch.equal(flash_attn_func(q, k, v, causal=True), wanted.view_as(q))


def test_boundaries_that_the_kernel_would_misread_are_refused() -> None:
    """It takes int32, and computes no rows beyond the longest that it is told of."""
    q, bounds = torch.randn(6, 2, 8), torch.tensor([0, 4, 6])
    with pytest.raises(TypeError, match="int32"):
        flash_attn_varlen_func(q, q, q, bounds, bounds, 4, 4)
    with pytest.raises(ValueError, match="told of 3 tokens at most, a sequence has 4"):
        flash_attn_varlen_func(q, q, q, bounds.int(), bounds.int(), 3, 3)


@pytest.mark.parametrize("is_newer", [True, False])
def test_transformers_before_5_19_gets_one_function_and_later_two(is_newer: bool, monkeypatch: Any) -> None:
    from transformers import modeling_flash_attention_utils as theirs

    name = "_process_with_kvcache_kwargs_fn"
    if is_newer:
        monkeypatch.setattr(theirs, name, None, raising=False)
    else:
        monkeypatch.delattr(theirs, name, raising=False)
    with attention(model_of("llava"), "flash"):
        _, taken = theirs.lazy_import_flash_attention("flash_attention_2")
    assert [callable(one) for one in (taken if is_newer else [taken])] == [True] * (1 + is_newer)
