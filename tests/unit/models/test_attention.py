"""Attention stays inside a sample, whichever kernel computes it."""

import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.microbatch import Microbatch, segments_of
from megatron.vlm.models.attention import core_attention
from megatron.vlm.models.attention.core_attention import ImageAttention, IsolatedAttention, TileAttention

HEADS, GROUPS, WIDTH = 4, 2, 8


def config(**changed: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_query_groups=GROUPS,
        attention_dropout=0.0, **changed,
    )  # fmt: skip


def pack(lengths: tuple[int, ...], seed: int) -> tuple[Microbatch, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(lengths), 1, heads, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    return Microbatch(lengths, len(lengths), sum(lengths)), tensors


def by_hand(
    lengths: tuple[int, ...], query: Tensor, key: Tensor, value: Tensor, scale: float | None = None,
    cap: float | None = None, first: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Softmax over an explicit mask: the same sample, and not later; or, in the first sample, what `first` says."""
    samples = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = (samples[:, None] == samples[None]) & torch.ones(len(samples), len(samples)).tril().bool()
    if first is not None:
        allowed[: lengths[0], : lengths[0]] = first
    q, k, v = (tensor[:, 0].transpose(0, 1) for tensor in (query, key, value))
    k, v = (tensor.repeat_interleave(HEADS // GROUPS, dim=0) for tensor in (k, v))
    scores = q @ k.transpose(1, 2) * (WIDTH**-0.5 if scale is None else scale)
    scores = torch.tanh(scores / cap) * cap if cap else scores
    return (scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1).unsqueeze(1)


def varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, max_q: int, max_k: int, scale: float | None = None
) -> Tensor:
    """What variable-length attention computes, causal, on the CPU; key and value in groups."""
    assert max_q == max_k == int(cu_seq_q.diff().max())
    lengths = tuple(cu_seq_q.diff().tolist())
    return by_hand(lengths, *(tensor.unsqueeze(1) for tensor in (query, key, value)), scale).reshape(query.shape)


def varlen_2_12(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
                window_size=(-1, -1), enable_gqa=False):  # type: ignore[no-untyped-def]  # fmt: skip
    assert (window_size, enable_gqa, key.shape[1]) == ((-1, 0), True, GROUPS)
    return varlen(query, key, value, cu_seq_q, max_q, max_k, scale)


def varlen_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
                window_size=(-1, -1)):  # type: ignore[no-untyped-def]  # fmt: skip
    """As torch 2.11 declares it: no groups."""
    assert (window_size, key.shape[1]) == ((-1, 0), HEADS)
    grouped = (tensor[:, :: HEADS // GROUPS] for tensor in (key, value))
    return varlen(query, *grouped, cu_seq_q, max_q, max_k, scale)


def varlen_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):  # type: ignore[no-untyped-def]
    """As torch 2.10 declares it: a switch instead of a window."""
    assert (is_causal, key.shape[1]) == (True, HEADS)
    grouped = (tensor[:, :: HEADS // GROUPS] for tensor in (key, value))
    return varlen(query, *grouped, cu_seq_q, max_q, max_k)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None):  # type: ignore[no-untyped-def]  # fmt: skip
    """As flash-attn 2.8 declares it: groups of heads are known by their shapes."""
    assert (causal, dropout_p, k.shape[1]) == (True, 0.0, GROUPS)
    return varlen(q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k, softmax_scale)


def flash_attn_varlen_func_4(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                             max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None,
                             gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
                             window_size=(None, None), return_lse=False, **_):  # type: ignore[no-untyped-def]  # fmt: skip
    """As FlashAttention-4 declares it (4.0.0b36): another tensor in front of the lengths, and two results."""
    assert (causal, qv, seqused_q, k.shape[1]) == (True, None, None, GROUPS)
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    return varlen(q, k, v, cu_seqlens_q, max_seqlen_q, max_seqlen_k, softmax_scale), None


class DotProductAttention:
    """What Transformer Engine's attention computes over THD, on the CPU."""

    def __init__(
        self, heads: int, width: int, num_gqa_groups: int, qkv_format: str, softmax_scale: float | None
    ) -> None:
        self.scale = softmax_scale
        assert (heads, width, num_gqa_groups, qkv_format) == (HEADS, WIDTH, GROUPS, "thd")

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, **how: Any) -> Tensor:
        assert how.pop("attn_mask_type") == "padding_causal"
        assert set(how) == {"cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"}
        lengths = tuple(cu_seqlens_q.diff().tolist())
        layers = (tensor.unsqueeze(1) for tensor in (query, key, value))
        return by_hand(lengths, *layers, self.scale).squeeze(1)  # [T, heads * d]


@pytest.mark.parametrize(
    ("kernel", "of_torch"),
    [
        ("sample_by_sample", None), ("variable_length", varlen_2_10), ("variable_length", varlen_2_11),
        ("variable_length", varlen_2_12), ("flash_attention", None), ("flash_attention_4", None),
        ("transformer_engine", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("lengths", "scale"), [((5, 1, 9), 0.2), ((1, 1), None)])
def test_every_kernel_gives_what_samples_give_alone(
    monkeypatch: pytest.MonkeyPatch, kernel: str, of_torch: Callable[..., Tensor] | None, lengths: tuple[int, ...],
    scale: float | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(core_attention, "choose_kernel", lambda *_: kernel)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_torch)
    engine = types.SimpleNamespace(DotProductAttention=DotProductAttention)
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func))
    fourth = types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func_4)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fourth)
    layer = IsolatedAttention(config(softmax_scale=scale))
    batch, tensors = pack(lengths, seed=1)
    out = layer(*tensors, packed_seq_params=batch.segments)
    assert torch.allclose(out, by_hand(lengths, *tensors, scale), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_samples_are_seen_by_masks_others_by_order(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """No kernel for packs is asked, as none knows masks."""
    monkeypatch.setitem(core_attention.KERNELS, "flash_attention", lambda *_: pytest.fail("a kernel without masks"))
    monkeypatch.setattr(core_attention, "choose_kernel", lambda *_: "flash_attention")
    _, tensors = pack((6, 4), seed=2)
    both_ways = torch.ones(6, 6).bool()
    both_ways[0, 5] = False
    mask = torch.zeros(6, 6, dtype=dtype).masked_fill_(~both_ways, -torch.inf)
    tensors = [tensor.to(dtype) for tensor in tensors]
    out = IsolatedAttention(config())(*tensors, packed_seq_params=segments_of((6, 4), masks=(mask, None)))
    wanted = by_hand((6, 4), *(tensor.float() for tensor in tensors), first=both_ways)
    assert torch.allclose(out.float(), wanted, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_capped_scores_are_capped_before_the_mask_and_keep_no_square() -> None:
    """By the definition, with groups of heads, a scale of its own and a mask; what a layer keeps is what went in."""
    lengths, cap, scale = (12, 3), 0.7, 0.9
    _, tensors = pack(lengths, seed=2)
    seen = torch.ones(12, 12).tril().bool()
    seen[:5, :5] = True
    mask = torch.zeros(12, 12).masked_fill_(~seen, -torch.inf)
    attention = IsolatedAttention(config(softmax_scale=scale), cap=cap)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.numel()) or one, lambda one: one):
        mine = [tensor.clone().requires_grad_() for tensor in tensors]
        out = attention(*mine, packed_seq_params=segments_of(lengths, masks=(mask, None)))
    theirs = [tensor.clone().requires_grad_() for tensor in tensors]
    wanted = by_hand(lengths, *theirs, scale, cap, seen)
    assert torch.allclose(out, wanted, atol=1e-6)
    assert max(kept) <= HEADS * 12 * WIDTH < HEADS * 12 * 12
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    for one in (out, wanted):
        (one * weights).sum().backward()
    for one, other in zip(mine, theirs, strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6)


def test_capped_scores_drop_the_same_again_for_the_backward_pass() -> None:
    """What is given is linear in the values: so it is the sum of values times their gradients."""
    _, (query, key, value) = pack((12,), seed=4)
    attention = IsolatedAttention(config(), cap=0.7)
    attention.config.attention_dropout, attention.config.sequence_parallel = 0.5, True
    given = []
    for seed in (0, 1):
        value = value.detach().requires_grad_()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            out = attention(query, key, value, packed_seq_params=segments_of((12,)))
        out.sum().backward()
        assert value.grad is not None
        assert torch.allclose(out.sum(), (value * value.grad).sum(), rtol=1e-5)
        given.append(out.detach())
    assert not torch.allclose(*given)


def test_torch_still_takes_what_we_pass() -> None:
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    assert list(known)[:7] == list(inspect.signature(varlen_2_12).parameters)[:7]
    assert {"window_size", "enable_gqa", "scale"} <= known.keys()


@pytest.mark.parametrize("fill", [0, 2])
def test_rows_that_fill_up_behind_tiles_are_zero(fill: int) -> None:
    tokens, tiles = 6, 3
    layer = TileAttention(config(), tokens=tokens)
    layer.config.sequence_parallel, layer.config.tensor_model_parallel_size = True, tokens * tiles + fill
    generator = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn(tokens * tiles, 1, heads, WIDTH, generator=generator) for heads in (HEADS, GROUPS, GROUPS)
    )
    out = layer(query, key, value)
    assert out.shape == (tokens * tiles + fill, 1, HEADS * WIDTH)
    assert not out[tokens * tiles :].any()
    alone = TileAttention(config(), tokens=tokens)
    assert torch.equal(out[: tokens * tiles], alone(query, key, value))


def test_tiles_ask_for_a_shape_for_each_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN plans one by one: a budget of tiles bounds the plans of a run, however many packs it has."""
    asked, tokens, budget = set[tuple[int, ...]](), 5, 7

    def note(query: Tensor, *_: Any, **__: Any) -> Tensor:
        asked.add(tuple(query.shape))
        return query

    monkeypatch.setattr(core_attention, "scaled_dot_product_attention", note)
    numbers = torch.randint(1, budget + 1, (200,), generator=torch.Generator().manual_seed(4)).tolist()
    for tiles in numbers:
        TileAttention(config(), tokens)(*torch.zeros(3, tokens * tiles, 1, HEADS, WIDTH))
    assert asked == {(tiles, HEADS, tokens, WIDTH) for tiles in range(1, budget + 1)}


V, F, T, F4 = "VARIABLE_LENGTH", "FLASH_ATTENTION", "TRANSFORMER_ENGINE", "FLASH_ATTENTION_4"
HOPPER, BLACKWELL, AMPERE, OF_DESKS = (9, 0), (10, 0), (8, 0), (12, 0)


@pytest.mark.parametrize(
    ("there", "changed", "wanted"),
    [
        ((), {"params_dtype": torch.float32}, "sample_by_sample"), ((), {}, "sample_by_sample"),
        ((V,), {"params_dtype": torch.float32}, "sample_by_sample"), ((V,), {}, "variable_length"),
        ((F,), {}, "flash_attention"), ((V, F), {"params_dtype": torch.float16}, "flash_attention"),
        ((V, F, T), {"params_dtype": torch.float16}, "transformer_engine"),
        ((T,), {"params_dtype": torch.float32}, "sample_by_sample"), ((T,), {"dropout": 0.1}, "sample_by_sample"),
        # cuDNN trains no heads beyond 128, and launches blocks for a whole pack for each window.
        ((V, F, T), {"kv_channels": 128}, "transformer_engine"), ((V, F, T), {"kv_channels": 129}, "flash_attention"),
        ((V, F, T), {"kv_channels": 80, "images": True}, "flash_attention"),
        ((V, T), {"kv_channels": 256}, "variable_length"),
        ((V, T), {"kv_channels": 80, "images": True}, "variable_length"),
        ((T,), {"kv_channels": 256, "images": True}, "transformer_engine"),
        ((V, F4), {"gpu": HOPPER}, "flash_attention_4"), ((V, F, T, F4), {"gpu": BLACKWELL}, "flash_attention_4"),
        ((V, F4), {"gpu": AMPERE}, "variable_length"), ((V, F, F4), {"gpu": OF_DESKS}, "flash_attention"),
        ((V, F4), {"gpu": HOPPER, "kv_channels": 72, "images": True}, "flash_attention_4"),
        ((V, F4), {"gpu": HOPPER, "kv_channels": 256}, "flash_attention_4"),
        ((V, F4), {"gpu": BLACKWELL, "kv_channels": 256}, "flash_attention_4"),
        ((V, F4), {"gpu": BLACKWELL, "kv_channels": 192}, "variable_length"),
        ((V, F4), {"gpu": HOPPER, "kv_channels": 260}, "variable_length"),
        ((V, F4), {"gpu": HOPPER, "kv_channels": 76}, "variable_length"),
        ((V, F4), {"gpu": HOPPER, "params_dtype": torch.float32}, "sample_by_sample"),
        ((V, F4), {"gpu": HOPPER, "dropout": 0.1}, "sample_by_sample"),
    ],
)  # fmt: skip
def test_the_kernel_is_the_best_that_is_there(
    monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], changed: dict[str, Any], wanted: str
) -> None:
    for name in (V, F, T, F4):
        monkeypatch.setattr(platform, f"HAS_{name}", name in there)
    fields = {"params_dtype": torch.bfloat16, **changed}
    gpu = fields.pop("gpu", AMPERE)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: gpu)
    kind = ImageAttention if fields.pop("images", False) else IsolatedAttention
    dropout = fields.pop("dropout", 0.0)
    known = config(**fields)
    known.attention_dropout = dropout
    assert kind(known).kernel is core_attention.KERNELS.get(wanted)


def test_the_log_names_the_kernel_once(capsys: pytest.CaptureFixture[str]) -> None:
    core_attention._say.cache_clear()
    IsolatedAttention(config()), IsolatedAttention(config())
    assert capsys.readouterr().out.count("attention over packs: sample by sample") == 1
