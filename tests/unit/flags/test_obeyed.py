"""What Megatron's optimizers, schedules and precisions do with their flags, on our chain and executor."""

import math
import os
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.vlm.data.loader import microbatches
from tests.programs import CARDS, PLAIN, run_ranks
from tests.unit.data.workers import Worker

pytestmark = pytest.mark.starts
Trace = dict[str, Any]


@pytest.fixture(scope="module", params=[PLAIN, CARDS], ids=["CPU", "GPU"])
def traces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """On a machine with GPUs torch's kernel steps and clips."""
    path, steps = tmp_path_factory.mktemp("steps") / "steps.pt", "tests.unit.flags.steps"
    program, words = (steps, []) if request.param == PLAIN else ("cards.run", [steps])
    run_ranks(program, 1, [*words, str(path)], server=request.param)
    found: dict[str, Trace] = torch.load(path, weights_only=False)
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, weight in expected.items():
        assert torch.allclose(found[name].double(), weight, rtol=1e-5, atol=1e-7), name


def half_cosine(step: int, steps: int) -> float:
    return 2e-3 + 8e-3 * (1 + math.cos(math.pi * step / steps)) / 2


def assert_adamw(
    trace: Trace, rates: list[float], betas: tuple[float, float] = (0.9, 0.999), epsilon: float = 1e-8,
    clip: float = math.inf, shares: dict[str, float] | None = None, decays: dict[str, float] | None = None,
) -> int:  # fmt: skip
    """AdamW (arXiv 1711.05101), clipped by the norm of all gradients, parts of the model at shares of the rates and
    with decays of their own; how many steps were clipped."""
    weights = {name: weight.double() for name, weight in trace["weights"][0].items()}
    mean, square = ({name: torch.zeros_like(weight) for name, weight in weights.items()} for _ in range(2))
    (first, second), clipped = betas, 0
    for step, rate in enumerate(rates, start=1):
        gradients = {name: gradient.double() for name, gradient in trace["gradients"][step - 1].items()}
        norm = math.sqrt(sum(gradient.square().sum().item() for gradient in gradients.values()))
        clipped += norm > clip
        for name, whole in gradients.items():
            gradient, layer = whole * min(1.0, clip / (norm + 1e-6)), name.partition("links.")[2]
            part = "vit" if layer.startswith(("vit_", "patch_embed.")) else layer.partition(".")[0]
            mean[name] = first * mean[name] + (1 - first) * gradient
            square[name] = second * square[name] + (1 - second) * gradient.square()
            direction = mean[name] / (1 - first**step) / ((square[name] / (1 - second**step)).sqrt() + epsilon)
            decay = (decays or {}).get(part, 0.3) * weights[name] if weights[name].dim() > 1 else 0.0
            weights[name] = weights[name] - rate * (shares or {}).get(part, 1.0) * (direction + decay)
        assert_equal(trace["weights"][step], weights)
    return clipped


def test_adam_takes_the_steps_that_the_flags_say(traces: dict[str, Trace]) -> None:
    rates = [1e-3, 5.5e-3, 1e-2, *(half_cosine(step, 3) for step in (1, 2, 3))]
    assert traces["adam"]["rates"] == pytest.approx(rates)
    assert assert_adamw(traces["adam"], rates[:-1], (0.8, 0.95), 1e-3, clip=6)


def test_one_kernel_steps_and_clips_on_gpus(traces: dict[str, Trace]) -> None:
    """By the norm over the limit where it is above; in steps that loss scaling skips, weights stay to the bit."""
    trace = traces["adam"]
    norms = [math.sqrt(sum(one.double().square().sum() for one in step.values())) for step in trace["gradients"]]
    assert len({norm > 6 for norm in norms}) == 2, "some are clipped"
    for norm, clip in zip(norms, trace["clips"], strict=True):
        assert clip == (pytest.approx(norm / 6, rel=1e-5) if trace["on_gpus"] and norm > 6 else None)
    assert {*trace["fused"]} == {trace["on_gpus"]}
    assert not any(traces["parts"]["clips"]), "--clip-grad 0"
    assert not any(traces["sgd"]["fused"])
    for before, after in pairwise(traces["falling scale"]["weights"]):  # no scale that it reaches is small enough
        assert all(torch.equal(before[name], weight) for name, weight in after.items())


def test_parts_take_steps_at_their_own_rates(traces: dict[str, Trace]) -> None:
    shares, decays = {"vit": 0.1, "projector": 3.0}, {"vit": 0.1, "projector": 0.0}
    assert_adamw(traces["parts"], [half_cosine(step, 5) for step in range(5)], shares=shares, decays=decays)


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
            push = gradient.double() + (decay * weights[name] if weights[name].dim() > 1 else 0.0)
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
    ("case", "dtype"),
    [("bf16", torch.float32), ("bf16, reduced in bf16", torch.bfloat16), ("fp16", torch.float16),
     ("fp16, reduced in fp32", torch.float32)],
)  # fmt: skip
def test_gradients_are_kept_in_the_precision_asked_for(traces: dict[str, Trace], case: str, dtype: torch.dtype) -> None:
    assert {gradient.dtype for gradient in traces[case]["gradients"][0].values()} == {dtype}


def test_weights_start_as_the_flags_say(traces: dict[str, Trace]) -> None:
    start = {name.partition("links.")[2]: weight for name, weight in traces["start"]["weights"][0].items()}
    embedding = start["word_embed.embedding.weight"]
    assert embedding.shape[0] == 144  # 128 words, filled up to a multiple of 48
    deviations = {
        "word_embed.embedding.weight": 0.3, "head.linear.weight": 0.05,
        "llm_0.self_attention.linear_qkv.weight": 0.05,
        "llm_0.self_attention.linear_proj.weight": 0.05 / math.sqrt(2 * 4), "vit_3.mlp.linear_fc1.weight": 0.05,
    }  # fmt: skip
    for name, deviation in deviations.items():
        assert start[name].std().item() == pytest.approx(deviation, rel=0.08), name
    other = traces["other seed"]["weights"][0]
    same = [name for name, weight in traces["start"]["weights"][0].items() if torch.equal(weight, other[name])]
    assert all(name.endswith(("bias", "norm.weight", "scale")) for name in same), same


def test_logging_starts_at_the_level_asked_for(traces: dict[str, Trace]) -> None:
    assert traces["adam"]["logging_level"] < 40
    assert traces["start"]["logging_level"] == 40


@pytest.mark.parametrize(("workers", "images"), [(0, True), (1, True), (1, False)])
def test_workers_read_ahead_where_images_are_decoded(workers: int, images: bool) -> None:
    dataset: Any = Worker()
    dataset.reads_media = images
    order: Any = range(3)
    readers = {batch.samples for batch in microbatches(dataset, order, workers)}
    assert (os.getpid() in readers) == (workers == 0 or not images)
