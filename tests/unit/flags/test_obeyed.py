"""What Megatron's optimizers, schedules and precisions do with their flags, on our chain and executor."""

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.programs import run_ranks

pytestmark = pytest.mark.starts
Trace = dict[str, Any]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """One start of Megatron runs all cases."""
    path = tmp_path_factory.mktemp("steps") / "steps.pt"
    run_ranks("tests.unit.flags.steps", 1, [str(path)])
    found: dict[str, Trace] = torch.load(path, weights_only=False)
    return found


def decayed(weight: Tensor) -> bool:
    """Megatron's rule: vectors are not decayed."""
    return weight.dim() > 1


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, weight in expected.items():
        assert torch.allclose(found[name].double(), weight, rtol=1e-5, atol=1e-7), name


def test_adam_takes_the_steps_that_the_flags_say(traces: dict[str, Trace]) -> None:
    """AdamW (arXiv 1711.05101), clipped by the norm of all gradients, after a linear warm-up along half a cosine."""
    trace = traces["adam"]
    rates = [1e-3, 5.5e-3, 1e-2]
    rates += [2e-3 + 8e-3 * (1 + math.cos(math.pi * step / 3)) / 2 for step in (1, 2, 3)]
    assert trace["rates"] == pytest.approx(rates)
    weights = {name: weight.double() for name, weight in trace["weights"][0].items()}
    mean = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    square = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    clipped = 0
    for step, rate in enumerate(rates[:-1]):
        gradients = {name: gradient.double() for name, gradient in trace["gradients"][step].items()}
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
        clipped += norm > 0.5
        for name, whole in gradients.items():
            gradient = whole * min(1.0, 0.5 / (norm + 1e-6))
            mean[name] = 0.8 * mean[name] + 0.2 * gradient
            square[name] = 0.95 * square[name] + 0.05 * gradient.square()
            direction = mean[name] / (1 - 0.8 ** (step + 1))
            direction = direction / ((square[name] / (1 - 0.95 ** (step + 1))).sqrt() + 1e-3)
            decay = 0.3 * weights[name] if decayed(weights[name]) else 0.0
            weights[name] = weights[name] - rate * (direction + decay)
        assert_equal(trace["weights"][step + 1], weights)
    assert clipped


def test_parts_take_steps_at_their_own_rates(traces: dict[str, Trace]) -> None:
    """AdamW, each part at its share of the run's half cosine from 1e-2 to 2e-3, and with its own decay."""
    trace, shares, decays = traces["parts"], {"vit": 0.1, "projector": 3.0}, {"vit": 0.1, "projector": 0.0}
    weights = {name: weight.double() for name, weight in trace["weights"][0].items()}
    mean = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    square = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step in range(5):
        rate = 2e-3 + 8e-3 * (1 + math.cos(math.pi * step / 5)) / 2
        for name, whole in trace["gradients"][step].items():
            gradient, link = whole.double(), name.partition("links.")[2]
            part = "vit" if link.startswith(("vit_", "patch_embed.")) else link.partition(".")[0]
            mean[name] = 0.9 * mean[name] + 0.1 * gradient
            square[name] = 0.999 * square[name] + 0.001 * gradient.square()
            direction = mean[name] / (1 - 0.9 ** (step + 1))
            direction = direction / ((square[name] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
            decay = decays.get(part, 0.3) * weights[name] if decayed(weights[name]) else 0.0
            weights[name] = weights[name] - rate * shares.get(part, 1.0) * (direction + decay)
        assert_equal(trace["weights"][step + 1], weights)


def test_sgd_takes_the_steps_that_the_flags_say(traces: dict[str, Trace]) -> None:
    """Momentum, a decay that grows linearly over all steps, a warm-up over 2 of 5 and down a line to zero."""
    trace = traces["sgd"]
    rates = [0.0, 0.05, 0.1, 0.1 * 2 / 3, 0.1 / 3, 0.0]
    assert trace["rates"] == pytest.approx(rates)
    weights = {name: weight.double() for name, weight in trace["weights"][0].items()}
    momentum = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step, rate in enumerate(rates[:-1]):
        decay = 0.1 + 0.4 * step / 6
        for name, gradient in trace["gradients"][step].items():
            push = gradient.double() + (decay * weights[name] if decayed(weights[name]) else 0.0)
            momentum[name] = 0.7 * momentum[name] + push
            weights[name] = weights[name] - rate * momentum[name]
        assert_equal(trace["weights"][step + 1], weights)


def test_the_last_iterations_decay_as_wsd_says(traces: dict[str, Trace]) -> None:
    expected = [1e-2] * 4 + [1e-2 * (1 - math.sqrt(step / 3)) for step in (1, 2)]
    assert traces["wsd"]["rates"] == pytest.approx(expected)


def test_the_loss_is_scaled_as_the_flags_say(traces: dict[str, Trace]) -> None:
    assert traces["static scale"]["scales"] == [64.0] * 6
    top = 2.0**60
    assert traces["falling scale"]["scales"] == [top, top, top / 2, top / 4, top / 4, top / 4]
    assert traces["growing scale"]["scales"] == [16.0, 16.0, 32.0, 32.0, 64.0, 64.0]


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        ("bf16", torch.float32),
        ("bf16, reduced in bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("fp16, reduced in fp32", torch.float32),
    ],
)
def test_gradients_are_kept_in_the_precision_asked_for(
    traces: dict[str, Trace], case: str, precision: torch.dtype
) -> None:
    assert {gradient.dtype for gradient in traces[case]["gradients"][0].values()} == {precision}


def test_weights_start_as_the_flags_say(traces: dict[str, Trace]) -> None:
    start = {name.partition("links.")[2]: weight for name, weight in traces["start"]["weights"][0].items()}
    embedding = start["word_embed.embedding.weight"]
    assert embedding.shape[0] == 144  # 128 words, filled up to a multiple of 48
    deviations = {
        "word_embed.embedding.weight": 0.3,
        "head.linear.weight": 0.05,
        "llm_0.self_attention.linear_qkv.weight": 0.05,
        "llm_0.self_attention.linear_proj.weight": 0.05 / math.sqrt(2 * 4),
        "vit_3.mlp.linear_fc1.weight": 0.05,
    }
    for name, deviation in deviations.items():
        assert start[name].std().item() == pytest.approx(deviation, rel=0.08), name
    other = traces["other seed"]["weights"][0]
    same = [name for name, weight in traces["start"]["weights"][0].items() if torch.equal(weight, other[name])]
    assert all(name.endswith(("bias", "norm.weight", "scale")) for name in same), same


def test_logging_starts_at_the_level_asked_for(traces: dict[str, Trace]) -> None:
    assert traces["adam"]["logging_level"] < 40
    assert traces["start"]["logging_level"] == 40


class ProcessIds(torch.utils.data.Dataset):
    """Stands for a dataset: a microbatch that says which process read it."""

    def __init__(self, reads_images: bool) -> None:
        self.reads_images = reads_images

    def __getitem__(self, pack: int) -> Any:
        from megatron.vlm.microbatch import Microbatch

        return Microbatch(tiles=0, lengths=(), samples=os.getpid(), useful_tokens=pack)


@pytest.mark.parametrize(("workers", "images"), [(0, True), (1, True), (1, False)])
def test_workers_read_ahead_where_images_are_decoded(workers: int, images: bool) -> None:
    from megatron.vlm.data.loader import microbatches

    order: Any = [3, 1, 2]
    dataset: Any = ProcessIds(images)
    batches = list(microbatches(dataset, order, workers))
    assert [batch.useful_tokens for batch in batches] == order
    assert (os.getpid() in {batch.samples for batch in batches}) == (workers == 0 or not images)
