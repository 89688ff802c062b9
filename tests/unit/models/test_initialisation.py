"""Initial weights: every layer and tensor-parallel rank draws its own numbers, of the size asked for."""

import math
from dataclasses import dataclass, replace

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron.vlm.arguments import TrainingInputs
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.stage import Stage
from tests.distributed import harness
from tests.languages import altered

RANKS, STD = 4, 0.02
ALIKE_ON_ALL_RANKS = ("patch_embed", "newline")
OUTPUT_LAYERS = ("linear_proj.weight", "linear_fc2.weight", "input.projection.weight")
"""How the names of those in transformer layers end that write to the residual stream."""


@pytest.fixture(params=["host", "device"])
def drawn_on(request: pytest.FixtureRequest, inputs: TrainingInputs, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where Megatron draws initial weights: `--use-cpu-initialization` or without."""
    monkeypatch.setattr(inputs.args, "use_cpu_initialization", request.param == "host")
    return request.param


def chain_of(inputs: TrainingInputs, model: str, seed: int) -> Chain:
    return replace(harness.build_chain(inputs.args, harness.MODELS[model]), seed=seed)


def drawn_weights(chain: Chain) -> dict[str, Tensor]:
    return {
        f"{name}.{weight_name}": weight.detach()
        for layer, name in enumerate(chain.names)
        for weight_name, weight in chain.build(layer).named_parameters()
        if weight.dim() > 1
    }


def first_numbers(weight: Tensor) -> tuple[float, ...]:
    """Sixteen numbers that a stream begins with, whatever the deviation they were drawn for."""
    numbers = weight.flatten()[:16].double()
    return tuple((numbers / numbers.abs().max()).mul(1e4).round().tolist())


@pytest.mark.parametrize("seed", [7, 1234, 2**32 - 40])
def test_no_two_links_and_ranks_draw_the_same_numbers(
    inputs: TrainingInputs, drawn_on: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chain, seen = chain_of(inputs, "wide_norm", seed), {}
    for rank in range(RANKS):
        monkeypatch.setattr(parallel_state, "_MPU_TENSOR_MODEL_PARALLEL_RANK", rank)
        for name, weight in drawn_weights(chain).items():
            # What is not cut, and what the host draws whole, is the same on all ranks.
            alike = drawn_on == "host" or name.startswith(ALIKE_ON_ALL_RANKS)
            owner = (name, 0 if alike else rank)
            assert seen.setdefault(first_numbers(weight), owner) == owner
    drawn = drawn_weights(chain)
    own = sum(not name.startswith(ALIKE_ON_ALL_RANKS) for name in drawn) if drawn_on == "device" else 0
    assert len(seen) == len(drawn) + (RANKS - 1) * own


@pytest.mark.parametrize("layer", ["word_embed", "head"])
def test_the_host_draws_from_the_seed_and_the_place_in_the_chain(inputs: TrainingInputs, layer: str) -> None:
    """These numbers are those of all runs before: a change would make results incomparable."""
    chain = chain_of(inputs, "small", seed=5)
    place = chain.names.index(layer)
    wanted = torch.empty(128, 48).normal_(0.0, STD, generator=torch.Generator().manual_seed(5 + place))
    (weight,) = (weight for weight in chain.build(place).parameters() if weight.dim() > 1)
    assert torch.equal(weight, wanted)


@pytest.mark.parametrize("model", harness.MODELS)
def test_the_spread_of_every_weight_is_that_of_its_kind(inputs: TrainingInputs, drawn_on: str, model: str) -> None:
    """Matrices 0.02, those that write to the residual stream 0.02 / sqrt(2 layers); norms, LayerScale 1; biases 0.

    Norms of 1 + weight start from 0, convolutions within 1 / sqrt(tokens seen); a head of linear attention keeps
    e^(-A dt) of its state, A up to 16, dt from 0.001 to 0.1.
    """
    known = harness.MODELS[model]
    layers = min(3, known.vision.layers)  # fewer than the language model has
    shallow = replace(known, vision=replace(known.vision, layers=layers))
    chain = replace(harness.build_chain(inputs.args, shallow), seed=9)
    layers_of = {"vit": layers, "llm": chain.architecture.language.layers}
    layers_of |= {one.modality.kinds[1]: one.layers for one in known.further}
    for layer, name in enumerate(chain.names):
        for inside, weight in chain.build(layer).named_parameters():
            whole, part = f"{name}.{inside}", name.partition(".")[0]
            if inside.endswith(("a_log", "dt_bias")):
                least, most = (0.01, 16) if inside.endswith("a_log") else (1e-3, 1e-1)
                drawn = weight.exp() if inside.endswith("a_log") else torch.nn.functional.softplus(weight)
                assert len(set(drawn.tolist())) == len(drawn)
                assert ((least <= drawn) & (drawn <= most)).all()
            elif inside.endswith(".ranges"):  # nothing is clamped
                assert all(row == [-math.inf, math.inf] * 2 for row in weight.tolist())
            elif weight.dim() == 1:
                norms = ("llm", "head") if inside != "self_attention.norm_weight" else ()
                centred = known.language.centred_norms and whole.startswith((*norms, *["projector.norm"] * known.pools))
                wanted = 0.0 if centred or inside.endswith(("bias", "shift")) else 1.0
                assert torch.equal(weight, torch.full_like(weight, wanted)), whole
            else:
                writes, count = part in layers_of and inside.endswith(OUTPUT_LAYERS), weight.numel()
                spread = STD / math.sqrt(2 * layers_of[part]) if writes else STD
                spread = (3 * weight.shape[1]) ** -0.5 if inside.endswith("convolution") else spread
                assert weight.std().item() == pytest.approx(spread, rel=4 / math.sqrt(2 * count)), whole
                assert abs(weight.mean().item()) < 4.5 * spread / math.sqrt(count), whole


@dataclass(frozen=True)
class Group:
    """One rank's view of a process group in which nothing is exchanged."""

    ranks: int
    here: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.here


@pytest.mark.parametrize("dealt", [2, 4])
def test_an_expert_starts_alike_wherever_it_lies(
    inputs: TrainingInputs, drawn_on: str, monkeypatch: pytest.MonkeyPatch, dealt: int
) -> None:
    """Bit for bit, as with all experts on one rank; and so does all beside the experts."""
    chain = chain_of(inputs, "experts", seed=17)
    layer = chain.kinds.index("llm")
    whole = dict(chain.build(layer).named_parameters())
    found: dict[str, list[Tensor]] = {name: [] for name in whole}
    for rank in range(dealt):
        monkeypatch.setattr(parallel_state, "_EXPERT_MODEL_PARALLEL_GROUP", Group(dealt, rank))
        monkeypatch.setattr(parallel_state, "_MPU_EXPERT_MODEL_PARALLEL_RANK", rank)
        for name, weight in chain.build(layer).named_parameters():
            found[name].append(weight)
    for name, weights in found.items():
        if ".experts." in name:
            assert torch.equal(torch.cat(weights), whole[name]), name
        else:
            assert all(torch.equal(weight, whole[name]) for weight in weights), name


ODD = replace(
    harness.SMALL, vision=replace(harness.SMALL.vision, heads=5, hidden_size=80, normalization="RMSNorm", qk_norm=True),
    language=altered(harness.SMALL.language, heads=6, kv_heads=3, head_dim=16, qkv_bias=True, qk_norm=True),
)  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_odd_heads_start_as_on_one_rank(inputs: TrainingInputs, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """Their gradients are zero too: hf/parity.py. Five heads of the ViT, three groups of two of the language model."""

    def weights() -> dict[str, torch.nn.Parameter]:
        chain = replace(harness.build_chain(inputs.args, ODD), seed=11)
        return {f"{layer}.{name}": weight for layer in range(len(chain.kinds))
                for name, weight in chain.build(layer).named_parameters()}  # fmt: skip

    monkeypatch.setattr(inputs.args, "use_cpu_initialization", True)
    whole = weights()
    for name in ("tensor_model_parallel_size", "tensor_parallel_num_weight_shards"):
        monkeypatch.setattr(inputs.args, name, 2)
    monkeypatch.setattr(parallel_state, "_TENSOR_MODEL_PARALLEL_GROUP", Group(2, rank))
    for name, weight in weights().items():
        dim, stride, wanted = getattr(weight, "partition_dim", -1), getattr(weight, "partition_stride", 1), whole[name]
        if dim >= 0:
            missing = [0] * (2 * (wanted.dim() - dim) - 1) + [2 * weight.shape[dim] - wanted.shape[dim]]
            wanted = torch.cat(torch.nn.functional.pad(wanted, missing).chunk(2 * stride, dim)[rank::2], dim)
        assert torch.equal(weight, wanted), name


def test_copies_of_a_tied_weight_start_alike(inputs: TrainingInputs, drawn_on: str) -> None:
    chain = chain_of(inputs, "tied", seed=13)
    first, last = Stage(chain, 0, len(chain.kinds) - 1), Stage(chain, len(chain.kinds) - 1, len(chain.kinds))
    assert torch.equal(first.links["word_embed"].embedding.weight, last.links["head"].linear.weight)
