"""Linear attention of a pack: what its samples give alone, token by token, by the rule as published."""

import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_probes
from megatron.vlm import platform
from megatron.vlm.arguments import TrainingInputs
from megatron.vlm.defaults import preset_defaults
from megatron.vlm.models.chain import Chain
from megatron.vlm.models.linear import convolution, delta_rule
from megatron.vlm.models.linear.delta_rule import CHUNK, Chunks
from megatron.vlm.models.linear.gated_delta_net import GatedDeltaNet, Runs
from omnibal_ext.architectures.presets import PRESETS
from omnibal_ext.plan import single_stage_plan
from tests.distributed import harness
from tests.languages import with_layers
from tests.unit.alone import megatron_alone

LENGTHS = (1, 63, 64, 2, 65, 200, 7)
"""Around one chunk and the next, in no order of length."""
HEADS, KEY, VALUE = 3, 6, 5


def inputs(seed: int = 1) -> list[Tensor]:
    """Query, key, value, logarithm of what is kept, share that is learned, of all tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(LENGTHS)
    query, key, value = (torch.randn(rows, HEADS, width, generator=generator) for width in (KEY, KEY, VALUE))
    decay, rate = (torch.rand(rows, HEADS, generator=generator) for _ in range(2))
    return [one.requires_grad_() for one in (query, key, value, -0.2 * decay, rate)]


def token_by_token(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
    """One sample, in fp64: S = e^d S + k r (v - k e^d S), out = q S / sqrt(width); heads are a batch."""
    state, out = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64), []
    query, key = (one / (one.square().sum(-1, keepdim=True) + 1e-6).sqrt() for one in (query.double(), key.double()))
    for q, k, v, d, r in zip(query, key, value.double(), decay.double(), rate.double(), strict=True):
        kept = d.exp()[:, None, None] * state
        found = torch.einsum("hkv,hk->hv", kept, k)
        state = kept + torch.einsum("hk,hv->hkv", k, r[:, None] * (v - found))
        out.append(torch.einsum("hkv,hk->hv", state, q) / KEY**0.5)
    return torch.stack(out)


def by_samples(parts: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
    return [*zip(*(part.split(LENGTHS) for part in parts), strict=True)]


@pytest.mark.parametrize("size", [CHUNK, 16])
def test_chunks_of_a_pack_are_its_samples_token_by_token(size: int) -> None:
    mine, theirs = inputs(), inputs()
    out = delta_rule.in_chunks(*mine, Chunks.of(LENGTHS, size))
    wanted = torch.cat([token_by_token(*sample) for sample in by_samples(theirs)])
    assert (out - wanted).abs().max() < 2e-6
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    (out * weights).sum().backward()
    (wanted * weights).sum().backward()
    for found, exact in zip(mine, theirs, strict=True):
        assert (found.grad - exact.grad).abs().max() < 2e-6 * max(1.0, exact.grad.abs().max().item())


@pytest.mark.parametrize("kernel", [1, 3, 4])
def test_the_convolution_of_a_pack_is_torchs_of_its_samples(kernel: int) -> None:
    generator = torch.Generator().manual_seed(3)
    rows, weight = torch.randn(sum(LENGTHS), 8, generator=generator), torch.randn(8, kernel, generator=generator)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    out = convolution.by_shifts(rows, weight, positions)
    for found, sample in zip(out.split(LENGTHS), rows.split(LENGTHS), strict=True):
        every = torch.nn.functional.conv1d(sample.T[None], weight[:, None], padding=kernel - 1, groups=8)
        assert (found - torch.nn.functional.silu(every[0, :, : len(sample)].T)).abs().max() < 2e-6


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins with the arguments of flash-linear-attention's functions, which compute by transformers; they are told
    what a chunk is, as the kernels are."""
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")

    def lengths_of(cu_seqlens: Tensor, chunk_indices: Tensor) -> list[int]:
        lengths = cu_seqlens.diff().tolist()
        chunks = [[sample, n] for sample, length in enumerate(lengths) for n in range(math.ceil(length / 64))]
        assert (chunk_indices.tolist(), chunk_indices.dtype) == (chunks, cu_seqlens.dtype)
        return lengths

    def rule(
        q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, cu_seqlens: Tensor, chunk_indices: Tensor,
        **how: Any,
    ) -> Any:  # fmt: skip
        assert how == {"use_qk_l2norm_in_kernel": True}
        lengths = lengths_of(cu_seqlens, chunk_indices)
        samples = zip(*(one.split(lengths, dim=1) for one in (q, k, v, g, beta)), strict=True)
        each = [qwen.torch_chunk_gated_delta_rule(*sample, use_qk_l2norm_in_kernel=True)[0] for sample in samples]
        return torch.cat(each, dim=1), None

    def convolve(
        x: Tensor, weight: Tensor, bias: None, activation: str, cu_seqlens: Tensor, chunk_indices: Tensor
    ) -> Any:
        each = [
            qwen.causal_conv1d_fn(sample.transpose(1, 2), weight, bias, activation).transpose(1, 2)
            for sample in x.split(lengths_of(cu_seqlens, chunk_indices), dim=1)
        ]
        return torch.cat(each, dim=1), None

    for name, found in (("fla.ops.gated_delta_rule", rule), ("fla.modules.causal_conv1d", convolve)):
        module: Any = ModuleType(name)
        module.chunk_gated_delta_rule = module.causal_conv1d = found
        monkeypatch.setitem(sys.modules, name, module)


def test_the_verdict_on_a_gpu_tells_kernels_from_torch(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_probes.linear_attention(320) == {}
    monkeypatch.setattr(gpu_probes, "SEGMENTS", (1, 30))
    monkeypatch.setattr(platform, "HAS_LINEAR_ATTENTION", True)
    found = gpu_probes.linear_attention(320)
    assert found.keys() == {f"{name}, {count} samples" for name in ("delta rule", "convolution") for count in (1, 30)}
    assert max(found.values()) < 0.1, "of 30 samples the stand-in adds up gradients in half precision"
    sound = delta_rule.by_kernel
    monkeypatch.setattr(delta_rule, "by_kernel", lambda *given: sound(*given) * 1.1)
    assert gpu_probes.linear_attention(320)["delta rule, 1 samples"] > 0.09


@pytest.fixture(scope="module")
def small() -> Iterator[TrainingInputs]:
    with megatron_alone("linear") as inputs:
        yield inputs


def test_kernels_are_for_half_precision(small: TrainingInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 they would round to TF32; without them torch has chunks to go by."""
    pack = harness.sample_packs(model="linear")[2]
    assert isinstance(Runs.of(pack, torch.bfloat16).chunks, Chunks)
    monkeypatch.setattr(platform, "HAS_LINEAR_ATTENTION", True)
    assert isinstance(Runs.of(pack, torch.bfloat16).chunks, Tensor)
    assert isinstance(Runs.of(pack, torch.float32).chunks, Chunks)


def test_a_layer_of_kernels_is_that_of_torch(small: TrainingInputs, kernels: None) -> None:
    layer, pack = mixer_of(small), harness.sample_packs(model="linear")[7]
    chunks = Runs.of(pack, torch.float32)
    found = []
    for runs in (chunks, replace(chunks, chunks=delta_rule.chunk_indices(pack.lengths))):
        layer.zero_grad()
        hidden = torch.randn(pack.tokens, 1, 48, generator=torch.Generator().manual_seed(4), requires_grad=True)
        out, bias = layer(hidden, packed_seq_params=runs)
        assert bias is None
        out.square().sum().backward()
        found.append([out, hidden.grad, *(weight.grad for weight in layer.parameters())])
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() < 1e-5 * one.abs().max()


def mixer_of(small: TrainingInputs) -> GatedDeltaNet:
    chain = Chain.of(small.args, small.architecture)
    found = chain.build(chain.kinds.index("llm")).self_attention
    assert isinstance(found, GatedDeltaNet)
    return found


def test_a_model_may_have_no_other_layers(small: TrainingInputs) -> None:
    """Megatron's flags ask for heads of softmax attention; and a hash has no names of such heads."""
    model = replace(harness.LINEAR, language=with_layers(harness.LINEAR.language, 1))
    flags = preset_defaults(model, single_stage_plan(model.chain), small.args)
    chain = harness.build_chain(Namespace(**vars(small.args) | flags), model)
    found = harness.reference(chain, harness.sample_packs("short", model="linear"))
    assert found.gradients["llm_0.self_attention.a_log"].abs().sum() > 0
    three, four = (with_layers(PRESETS["qwen3.5-9b"].language, count) for count in (3, 4))
    assert replace(model, language=three).hash != replace(model, language=four).hash
