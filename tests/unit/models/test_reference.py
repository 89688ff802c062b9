"""Half precision differs by its rounding from fp32, which hf/test_parity.py compares with transformers; the head."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.configs import language_config
from megatron.vlm.models.cross_entropy import token_losses
from megatron.vlm.pipeline.stage import Stage
from omnibal_ext.architectures import presets
from omnibal_ext.architectures.architecture import Architecture
from tests.distributed import harness
from tests.languages import altered, with_layers
from tests.media import seen, with_images
from tests.unit.alone import megatron_alone

# Every epsilon is another one, and not a default.
LANGUAGE = altered(with_layers(harness.SMALL.language, 2), norm_epsilon=2e-5, qkv_bias=True)
VISION = replace(harness.SMALL.vision, layers=2, norm_epsilon=3e-6)
INTERNVL = Architecture("internvl", VISION, LANGUAGE)
INTERNVL_6B = replace(
    INTERNVL, name="6b", vision=replace(VISION, normalization="RMSNorm", qkv_bias=False, qk_norm=True, final_norm=True)
)
CLIP = replace(VISION, norm_epsilon=7e-6, activation="quick_gelu", patch_bias=False, pre_norm=True, layer_scale=False)
LLAVA = Architecture("llava", CLIP, LANGUAGE, shuffle=1, projector_norm=False, class_token=True)
MODELS = {model.name: model for model in (INTERNVL, INTERNVL_6B, LLAVA)}
LOSS_SCALE = 2.0**12  # fp16 would lose small gradients
SMALL_ACTIVATIONS = ("linear_qkv.weight", "linear_proj", "linear_fc2", "word_embed", "patch_embed")
"""Weights so small that what is normalised behind them is not large beside epsilon."""


@dataclass(frozen=True)
class Answer:
    losses: Tensor
    gradients: dict[str, Tensor]


@pytest.fixture(scope="module")
def args() -> Iterator[Namespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(presets.PRESETS, "internvl", INTERNVL)
        with megatron_alone("internvl") as inputs:
            yield inputs.args


def random_weights(architecture: Architecture, args: Namespace, seed: int) -> dict[str, Tensor]:
    """fp32, none of them at its start: norms, scales and biases too are random."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for full_name, weight in build(architecture, args, torch.float32, {}).named_parameters():
        name = full_name.removeprefix("links.")
        spread = 0.004 if any(part in name for part in SMALL_ACTIVATIONS) else 0.12
        center = 1.0 if weight.dim() == 1 and not name.endswith("bias") else 0.0
        weights[name] = center + spread * torch.randn(weight.shape, generator=generator)
    return weights


def build(architecture: Architecture, args: Namespace, dtype: torch.dtype, weights: dict[str, Tensor]) -> Stage:
    args.params_dtype, args.bf16, args.fp16 = dtype, dtype == torch.bfloat16, dtype == torch.float16
    stage = Stage(harness.build_chain(args, architecture), 0, len(architecture.chain))
    stage.to(dtype)  # what Megatron's Float16Module does
    stage.load_state_dict({f"links.{name}": weight for name, weight in weights.items()}, strict=bool(weights))
    return stage


def pack(architecture: Architecture) -> Microbatch:
    """Two tiles, one, none, and a sample of one token."""
    generator = torch.Generator().manual_seed(3)
    whole = harness._pack(architecture, [2, 1, 0, 0], lengths(architecture), 1, generator)
    return replace(whole, supervised=None)


def lengths(architecture: Architecture) -> list[int]:
    tokens = architecture.image_tokens_per_tile
    return [2 * tokens + 5, tokens + 7, 9, 1]


def in_fp32(architecture: Architecture, args: Namespace, weights: dict[str, Tensor], batch: Microbatch) -> Answer:
    stage = build(architecture, args, torch.float32, weights)
    losses = stage(batch)
    losses.mean().backward()
    return Answer(losses.detach(), {name: weight.grad for name, weight in stage.named_parameters()})


def largest_differences(stage: Stage, batch: Microbatch, answer: Answer) -> tuple[float, float, str]:
    """Of the losses; of the gradients, beside the largest entry of each weight's; and of which weight."""
    losses = stage(batch)
    assert losses.dtype == torch.float32
    (losses.mean() * LOSS_SCALE).backward()
    gradients = {}
    for name, weight in stage.named_parameters():
        wanted = answer.gradients[name]
        gradients[name] = ((weight.grad.double() / LOSS_SCALE - wanted).abs().max() / wanted.abs().max()).item()
    worst = max(gradients, key=gradients.__getitem__)
    return (losses.double() - answer.losses).abs().max().item(), gradients[worst], worst


@pytest.mark.parametrize(("dtype", "bits"), [(torch.bfloat16, 8), (torch.float16, 11)])
@pytest.mark.parametrize("model", MODELS)
def test_half_precision_differs_by_its_rounding(args: Namespace, model: str, dtype: torch.dtype, bits: int) -> None:
    """From the same rounded weights: what differs is the rounding of activations, a few units of the last bit."""
    weights, batch = random_weights(MODELS[model], args, seed=1), pack(MODELS[model])
    rounded = {name: weight.to(dtype) for name, weight in weights.items()}
    batch = with_images(batch, values=seen(batch).values.to(dtype).float())
    answer = in_fp32(MODELS[model], args, rounded, batch)
    assert answer.losses.std() > 0.1, "losses so alike that any model would pass"
    loss, gradient, worst = largest_differences(build(MODELS[model], args, dtype, rounded), batch, answer)
    unit = 2.0**-bits
    assert loss < 20 * unit  # seen: 10
    assert gradient < 100 * unit, worst  # seen: 8, and 43 where a norm stands over queries near fp16's smallest numbers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_computed_in_fp32_from_the_logits_that_there_are(args: Namespace, dtype: torch.dtype) -> None:
    weights, batch = random_weights(INTERNVL, args, seed=2), pack(INTERNVL)
    stage = build(INTERNVL, args, dtype, {name: weight.to(dtype) for name, weight in weights.items()})
    with torch.no_grad():
        logits, losses = stage(replace(batch, labels=None)), stage(batch)
    assert logits.dtype == dtype
    exact = -logits[:, : LANGUAGE.vocab_size].double().log_softmax(-1)[torch.arange(batch.tokens), batch.labels]
    assert losses.dtype == torch.float32
    assert torch.allclose(losses.double(), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("count", [0, 1, 700])
def test_the_head_computes_what_counts_and_nothing_else(args: Namespace, count: int) -> None:
    """Losses and every gradient are those of all tokens, weighted by zero where none counts; in chunks of rows too."""
    weights = random_weights(INTERNVL, args, seed=4)
    head = build(INTERNVL, args, torch.float32, weights).links["head"]
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(1300, 1, LANGUAGE.hidden_size, generator=generator)
    labels = torch.randint(0, LANGUAGE.vocab_size, (1300,), generator=generator)
    chosen = torch.randperm(1300, generator=generator)[:count].sort().values
    counts = torch.zeros(1300).index_fill(0, chosen, 1.0)
    batch = Microbatch((1300,), 1, 1300, labels=labels, supervised=chosen)
    answers, multiplied = [], list[int]()
    head.linear.register_forward_pre_hook(lambda _, entering: multiplied.append(len(entering[0])))
    for one in (batch, replace(batch, supervised=None)):
        entering = hidden.clone().requires_grad_()
        losses = head(entering, one) * counts
        found = torch.autograd.grad(losses.sum(), [entering, *head.parameters()])
        answers.append((losses.detach(), *found))
    assert multiplied == [count, 1300]
    for mine, wanted in zip(*answers, strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-4, atol=1e-5)
    exact = head(hidden, replace(batch, labels=None)).double().log_softmax(-1)[torch.arange(1300), labels]
    assert torch.allclose(answers[0][0].double(), -exact * counts, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_the_head_takes_the_cross_entropy_that_the_flag_says(args: Namespace, fused: bool) -> None:
    """Core's compiled one gives its gradients in bf16, whatever the logits'; ours in the logits' precision."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(40, LANGUAGE.vocab_size, generator=generator)
    labels = torch.randint(0, LANGUAGE.vocab_size, (40,), generator=generator)
    args.cross_entropy_loss_fusion = fused
    config = language_config(args, INTERNVL)
    args.cross_entropy_loss_fusion = False
    entering = logits.clone().requires_grad_()
    losses = token_losses(config, entering * 1, labels, parallel_state.get_tensor_model_parallel_group())
    (gradient,) = torch.autograd.grad(losses.sum(), entering)
    exact = logits.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    (of_exact,) = torch.autograd.grad(wanted.sum(), exact)
    assert torch.allclose(losses.double(), wanted, atol=1e-5)
    assert torch.allclose(gradient.double(), of_exact, rtol=1e-2 if fused else 1e-4, atol=1e-6)
    assert torch.equal(gradient, gradient.bfloat16().float()) == fused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_rotates_by_fp32_angles(args: Namespace, dtype: torch.dtype) -> None:
    stage = build(INTERNVL, args, dtype, {})
    batch = Microbatch((3000, 2), 2, 3002)
    angles = stage.language_viewer.rotaries[None].angles(batch)
    assert angles.dtype == torch.float32
    attention = LANGUAGE.attentions[0]
    half = attention.head_dim // 2
    speeds = torch.tensor([attention.rope.theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    positions = torch.tensor([*range(3000), 0, 1], dtype=torch.float64)
    exact = torch.outer(positions, speeds).repeat(1, 2)[:, None, None]
    assert torch.allclose(angles.double(), exact, rtol=3e-7, atol=0)
