"""What the profiler makes of its measurements: bytes counted once while they are held, medians, fits, lines."""

import statistics
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from megatron.vlm import platform
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.profiling import profiler, stage_pass
from megatron.vlm.profiling.action_costs import TransferCosts, measure_actions
from megatron.vlm.profiling.kept import KeptBytes
from megatron.vlm.profiling.layer_costs import KindMeasurement, _consecutive, fit_seconds
from megatron.vlm.profiling.profiler import ProfileJob, fit_line, measure_profile, seconds_of_weights, step_seconds
from megatron.vlm.profiling.stage_pass import synthetic_pack
from megatron.vlm.profiling.stopwatch import WARM_UP, Run, Stopwatch, at_usual_pace
from omnibal_ext.costs.profile import LayerCost, Profile
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import AUDIO, VISION
from omnibal_ext.trained import Trained
from tests.distributed import harness, late_bytes
from tests.distributed.conftest import run_program
from tests.media import audio_of
from tests.programs import ENGINE, PLAIN
from tests.unit.alone import megatron_alone
from tests.unit.layout.instances import make_profile


def test_every_storage_counts_once_as_long_as_autograd_holds_it() -> None:
    weight, entering = torch.ones(16, requires_grad=True), torch.ones(16)
    with KeptBytes([weight]) as kept:
        out = ((entering * weight) * entering).exp()  # holds `entering` twice and its own result, but no weight
        assert kept.bytes == kept.peak == 2 * 16 * 4
        more = (out * entering).sum()
        out.sum().backward()
        assert kept.bytes == 16 * 4  # the last product still holds `entering`
        del more, out
    assert (kept.bytes, kept.peak) == (0, 2 * 16 * 4)
    assert weight.grad is not None


def test_the_count_changes_no_gradient() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    entering = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    layer(entering).sum().backward()
    expected = [weight.grad.clone() for weight in layer.parameters()]
    layer.zero_grad()
    with KeptBytes(layer.parameters()):
        layer(entering).sum().backward()
    assert all(torch.equal(weight.grad, grad) for weight, grad in zip(layer.parameters(), expected, strict=True))


def test_a_fit_meets_the_budgets_exactly_and_has_no_negative_part() -> None:
    features = [(1.0, 100.0, 2500.0), (1.0, 50.0, 700.0), (1.0, 100.0, 10000.0)]
    truth = (0.5, 0.02, 0.001)
    seconds = [sum(a * b for a, b in zip(truth, row, strict=True)) for row in features]
    assert fit_seconds(features, seconds) == pytest.approx(truth)
    # The longer sample was faster: no such thing; and random ones, some of which leave one coefficient.
    for times in ([3.0, 1.0, 2.9], *np.random.default_rng(0).uniform(0, 3, (50, 3)).tolist()):
        noisy = fit_seconds(features, times)
        assert min(noisy) >= 0
        assert sum(a * b for a, b in zip(noisy, features[0], strict=True)) == pytest.approx(times[0])


@pytest.fixture(params=["small", "native", "gemma", "hearing", "hearing_features", "filming"])
def chain(request: pytest.FixtureRequest) -> Iterator[Chain]:
    with megatron_alone(request.param) as inputs:
        yield Chain.of(inputs.args, inputs.architecture)


def test_made_up_packs_run_through_the_model(chain: Chain) -> None:
    """Images that fit into a sample, images that reach over its end, and none; of sounds and frames likewise."""
    model = Stage(chain, 0, len(chain.kinds))
    for most, lengths, frames in ((0, [5], 0), (8, [30, 40], 50), (60, [200, 90], 4000), (5000, [700, 900], 7)):
        tiles = most if chain.architecture.vision.native else min(most, sum(lengths) // 4)
        pack = synthetic_pack(chain.architecture, {"tiles": tiles, "frames": frames, "stills": frames % 99}, lengths)
        assert pack.media_of("frames").amount == (frames if audio_of(chain.architecture) else 0)
        losses = model(pack)
        assert losses.isfinite().all()
        losses.sum().backward()


@pytest.mark.parametrize("kind", ["vit", "audio", "film", "film_projector"])
def test_a_pack_without_tiles_gives_every_weight_it_passes_by_a_gradient_of_zero(chain: Chain, kind: str) -> None:
    if kind not in chain.kinds:
        pytest.skip("a model that does not have it")
    layer = chain.kinds.index(kind)
    vit = Stage(chain, layer, layer + 1)
    pack = synthetic_pack(chain.architecture, {}, [5])
    entering = torch.empty(chain.shape_before(layer, pack), requires_grad=True)
    vit.set_input_tensor(entering)
    out = vit(pack)
    assert out.shape == chain.shape_before(layer + 1, pack)
    out.sum().backward()
    assert entering.grad is not None
    assert all(weight.grad is not None and not weight.grad.any() for weight in vit.parameters())


@pytest.mark.usefixtures("one_rank")
def test_rounds_that_warm_up_do_not_count() -> None:
    calls: Counter[str] = Counter()

    def run(name: str) -> tuple[float]:
        calls[name] += 1
        return (50.0 if name == "a" and calls[name] <= WARM_UP else 1.0,)

    stopwatch = Stopwatch(steps=3)
    found = stopwatch.measure({"vit": {name: partial(run, name) for name in "ab"}})["vit"]
    assert calls == dict.fromkeys("ab", WARM_UP + 3)
    assert found["a"] == pytest.approx(found["b"])
    assert stopwatch.disturbed["vit"].endswith(" of 6")


def test_a_machine_that_turns_slow_between_two_runs_changes_no_share() -> None:
    # Two rounds fast, two slow, and one in which the second run is slow already: medians of bare seconds say 2 to 4.5.
    seconds = [(2.0, 3.0), (2.0, 3.0), (2.0, 4.5), (3.0, 4.5), (3.0, 4.5)]
    rounds = [(a + b, {("vit", "0"): (a,), ("llm", "0"): (b,)}) for a, b in seconds]
    found = {subject: statistics.median(parts[0]) for (subject, _), parts in at_usual_pace(rounds).items()}
    assert found["vit"] / found["llm"] == pytest.approx(2 / 3)
    assert found["vit"] + found["llm"] == pytest.approx(6.5)  # the median round


def test_an_optimizer_step_is_a_constant_and_a_time_a_weight() -> None:
    assert fit_line([(10.0, 3.0), (20.0, 5.0), (40.0, 9.0)]) == pytest.approx((1.0, 0.2))
    assert fit_line([(10.0, 1.0), (20.0, 5.0)])[0] == 0.0  # never less than nothing
    assert fit_line([(10.0, 1.0)]) == pytest.approx((0.0, 0.1))


def test_a_layer_of_many_small_tensors_takes_longer_for_each_of_its_weights() -> None:
    """Three kinds on a line of 1 + .2 a weight, and one above: the constant is the line's, the rest each kind's own."""
    stepped = {"llm": (40.0, 9.0), "head": (20.0, 5.0), "projector": (10.0, 3.0)}
    constant, own = seconds_of_weights(stepped)
    assert (constant, own) == (pytest.approx(1.0), pytest.approx(dict.fromkeys(stepped, 0.2)))
    constant, own = seconds_of_weights({**stepped, "vit": (20.0, 9.0)})
    for kind, (weights, seconds) in {**stepped, "vit": (20.0, 9.0)}.items():
        assert constant + weights * own[kind] == pytest.approx(seconds)
    assert own["vit"] > 1.5 * own["head"]
    assert seconds_of_weights({"llm": (10.0, 1.0), "head": (20.0, 0.0)})[1]["head"] == 0.0


WEIGHTS = {"patch_embed": 6, "vit": 30, "projector": 10, "word_embed": 50, "llm": 40, "head": 20}
COUNTS = {"vit": 2, "llm": 2}
A_STEP, A_WEIGHT = 3.0, 0.25
"""Seconds of an optimizer's step: what it takes however few weights it has, and for each of them."""


class Kind:
    """Stands for a kind's measurement: figures that its number of weights tells."""

    def __init__(self, _: object, chain: Any, kind: str, budgets: dict[str, int]) -> None:
        assert budgets == {"tiles": 5, "tokens": 7}
        self.kind, self.weights, self.parameters = kind, WEIGHTS[kind], 10 * WEIGHTS[kind]
        self.trained, self.trained_experts, self.count = (0 if kind == "vit" else WEIGHTS[kind]), 0, COUNTS.get(kind, 1)
        self.room, self.mode, self.stage = False, "trained", None

    def runs(self) -> dict[str, Run]:
        return {"0": lambda: (0.125 * self.weights, 0.5 * self.weights)}

    def release(self) -> None:
        self.room = True

    def optimizer_runs(self, _: object) -> dict[str, Run]:
        assert self.room
        return {"step": lambda: (A_STEP + A_WEIGHT * self.weights * self.count,)}

    def cost(self, seconds: dict[str, tuple[float, ...]], weight_bytes: float, step_seconds: float) -> LayerCost:
        return LayerCost(
            *seconds["0"], 1.0, recompute_kept_bytes=1.0, output_bytes=1.0, weight_bytes=weight_bytes,
            step_seconds=step_seconds,
        )  # fmt: skip


class Watch:
    disturbed: ClassVar = {"vit": "1 of 9"}

    def __init__(self, steps: int) -> None:
        assert steps == 11

    def measure(self, runs: dict[str, dict[str, Run]], _: str = "") -> dict[str, dict[str, tuple[float, ...]]]:
        return {subject: {name: run() for name, run in named.items()} for subject, named in runs.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_figure_of_a_profile_is_what_was_measured_for_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All fields. An iteration takes what the executor needs for it, and what a step takes without any weights. Float8
    is measured of half precision's language layers alone."""
    model, transfers = harness.SMALL, TransferCosts(0.01, 0.002, 0.0003)
    monkeypatch.setattr(profiler, "Stopwatch", Watch)
    monkeypatch.setattr(profiler, "KindMeasurement", Kind)
    monkeypatch.setattr(profiler, "measure_transfers", lambda _: transfers)
    monkeypatch.setattr(profiler, "measure_actions", lambda *_: (0.5, 0.75, 0.125))
    monkeypatch.setattr(platform, "overhead_bytes", lambda: 77)
    monkeypatch.setattr(platform, "multiplies_float8", lambda: True)
    monkeypatch.setattr(profiler, "float8_gains", lambda _, cost, tokens, steps: {"layer": tokens / steps})
    job = ProfileJob("small", {"tiles": 5, "tokens": 7}, tensor_parallel=2, data_parallel=4, frozen=("vit",), steps=11)
    chain: Any = SimpleNamespace(architecture=model, kinds=model.chain)
    found = measure_profile(
        Namespace(params_dtype=dtype, sequence_parallel=True, use_precision_aware_optimizer=False),
        chain,
        job,
        {"device": "a device", "torch": "2"},
    )
    half = dtype == torch.bfloat16
    ring = 4 * 0.0003 * 2 * 3 / 4
    layers = {}
    for kind, weights in WEIGHTS.items():
        trained = 0 if kind == "vit" else weights
        held = weights * (2 if half else 4) + trained * (4 + (12 if half else 8))
        layers[kind] = (0.125 * weights, 0.5 * weights, held, pytest.approx(trained * (A_WEIGHT + ring)))
    figures = ("forward_seconds", "backward_seconds", "weight_bytes", "step_seconds")
    assert {k: tuple(getattr(c, name) for name in figures) for k, c in found.layers.items()} == layers
    wanted = {
        "model": "small", "model_hash": model.hash, "chain": model.chain, "budgets": {"tiles": 5, "tokens": 7},
        "parameters": {kind: 10 * weights for kind, weights in WEIGHTS.items()},
        "tensor_model_parallel_size": 2, "expert_model_parallel_size": 1, "trained": Trained(("vit",)),
        "layers_apart": {}, "feature_layers": (), "features_joined": False, "carried_after": (),
        "device": "a device", "dtype": "bfloat16" if half else "float32", "transfer_seconds_per_byte": 0.002,
        "transfer_latency_seconds": 0.01, "overhead_bytes": 77, "action_seconds": 0.5, "host_action_seconds": 0.125,
        "supervised_share": 0.0,
        "iteration_seconds": pytest.approx(0.75 + A_STEP), "measured_with": {"device": "a device", "torch": "2"},
        "notes": {"disturbed": {"vit": "1 of 9"}, "reduction_seconds_per_byte": 0.0003,
                  **({"float8": {"llm": {"layer": 7 / 11}}} if half else {})},
        "whole_layers": {}, "image_tiles": 0.0, "replica_seconds_per_byte": 0.0, "corrected_by": {},
    }  # fmt: skip
    assert {*wanted, "layers", "schema_version"} == {field.name for field in fields(Profile)}
    assert {name: getattr(found, name) for name in wanted} == wanted


@pytest.mark.parametrize(("ranks", "share"), [(1, 0.0), (2, 1.0), (4, 1.5)])
def test_gradients_are_reduced_by_a_ring(ranks: int, share: float) -> None:
    job, layers = (
        ProfileJob("tiny", {"tiles": 1, "tokens": 1}, data_parallel=ranks),
        TransferCosts(reduction_seconds_per_byte=0.25),
    )
    assert step_seconds(job, 1.0, 0.0, 3.0, layers) == pytest.approx(3.0 + share)
    dealt = ProfileJob("tiny", {"tiles": 1, "tokens": 1}, data_parallel=2 * ranks, expert_parallel=2)
    assert step_seconds(dealt, 1.0, 1.0, 3.0, layers) == pytest.approx(3.0 + share), "over those with the same experts"


def test_vit_layers_with_windows_and_without_are_measured_apart() -> None:
    """Of four ViT layers, layers 1 to 4, the second sees whole images; two are measured where two follow each other."""
    kinds = harness.MODELS["native"].cost_kinds
    found = [_consecutive(kind, kinds) for kind in ("vit.1", "vit", "projector", "llm")]
    assert found == [(2, 1), (3, 2), (5, 1), (9, 2)]
    assert _consecutive("vit", harness.MODELS["small"].cost_kinds) == (1, 2)


@pytest.mark.parametrize("model", ["native", "layerless", "gemma_4_inputs"])
def test_actions_are_measured_with_one_layer_of_every_kind_that_there_is(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, build = [], stage_pass.Stage
    monkeypatch.setattr(stage_pass, "Stage", lambda *given, **more: built.append(build(*given, **more)) or built[-1])
    with megatron_alone(model) as inputs:
        figures = measure_actions(inputs.args, inputs.architecture, Stopwatch(1))
    assert len(figures) == 3
    assert min(figures) >= 0
    assert [stage.kinds for stage in built] == [tuple(dict.fromkeys(harness.MODELS[model].chain))]


@pytest.mark.parametrize("shared", [False, True])
def test_layers_are_measured_as_the_job_runs_them(shared: bool) -> None:
    flags = ProfileJob(
        "tiny", {"tiles": 1, "tokens": 1}, tensor_parallel=2, sequence_parallel=shared, bf16=True
    ).flags()
    assert ("--sequence-parallel" in flags) == shared
    assert {"--bf16", "--tensor-model-parallel-size"} <= set(flags)


@pytest.mark.parametrize("name", ["transfer_latency_seconds", "action_seconds", "iteration_seconds", "overhead_bytes"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "x"])
def test_impossible_constants_are_refused_by_name(name: str, value: object) -> None:
    record = make_profile().to_record()
    with pytest.raises(UserError, match=name):
        Profile.from_record({**record, name: value})


@pytest.mark.parametrize("layers", [(4,), (0, 1, 2, 3)])
def test_features_that_nobody_gives_or_takes_are_refused(layers: tuple[int, ...]) -> None:
    """Of four ViT layers, for three language layers."""
    with pytest.raises(UserError, match="feature_layers"):
        replace(make_profile(4, 3), feature_layers=layers).validate()
    replace(make_profile(4, 3), feature_layers=(0, 1, 3)).validate()
    replace(make_profile(4, 3), feature_layers=(0, 1, 2, 3), features_joined=True).validate()


@pytest.mark.starts
def test_what_layers_keep_is_measured_with_shared_tokens() -> None:
    """Sharing saves half of what lies between blocks; tokens that fill up take a little of it back."""
    saved = run_program("tests.distributed.kept_bytes", 2)
    assert {kind: share for kind, share in saved.items() if share < 0.9} == {}


@pytest.mark.parametrize("chain", ["gemma_4_inputs"], indirect=True)
def test_what_layers_read_of_others_is_no_part_of_what_they_keep(chain: Chain) -> None:
    """Layers of Gemma 4 E2B, recomputed, keep the hidden states; not what came beside these, of which a stage holds one
    tensor, keys and values in it. What goes out is counted without what is carried on."""
    language, number = chain.architecture.language, 4  # bytes, fp32
    kinds = [kind for kind in dict.fromkeys(chain.architecture.cost_kinds) if kind.startswith("llm")]
    assert len(kinds) == 4
    for kind in kinds:
        measured = KindMeasurement(harness.get_args(), chain, kind, {"tiles": 16, "tokens": 8})
        tokens = measured.packs[0].tokens
        sizes = (measured.count, measured.kept["recompute"], measured.output_bytes)
        assert sizes == (1, *[tokens * language.hidden_size * number] * 2), kind


@pytest.mark.parametrize("chain", ["hearing"], indirect=True)
def test_links_that_hear_are_measured_on_sounds_alone(chain: Chain) -> None:
    """Half as many frames for the fit, and a pack without any; what goes by the vision tower is nothing of its own."""
    audio = audio_of(chain.architecture)
    assert audio is not None
    for kind in ("audio_embed", "audio", "audio_projector", "patch_embed", "vit", "word_embed"):
        measured = KindMeasurement(harness.get_args(), chain, kind, {"tiles": 16, "tokens": 64, "frames": 80})
        frames, tiles = (80 * (kind not in VISION.kinds), 16 * (kind not in AUDIO.kinds))
        sizes = [tuple(pack.media_of(size).amount for size in ("tiles", "frames")) for pack in measured.packs[:2]]
        assert sizes == [(tiles, frames), (tiles // 2, frames // 2)], kind
        assert ("empty" in measured.runs()) == (kind != "word_embed"), kind
        if kind in AUDIO.kinds:
            assert measured._features(measured.packs[0]) == (1.0, 80, 0.0)
            rows, width = audio.rows(80), audio.hidden_size
            if kind == "audio_projector":
                rows, width = audio.tokens(80), chain.language.hidden_size
            assert measured.output_bytes == 4 * rows * width, kind


@pytest.mark.starts
@pytest.mark.parametrize("machine", [PLAIN, ENGINE], ids=["local", "engine"])
def test_a_split_backward_leaves_every_large_product_for_w(machine: str) -> None:
    """By hand: what enters each linear layer, and the gradient of what leaves it."""
    small, number = harness.SMALL, 4  # bytes, fp32
    vision, language = small.vision, small.language
    wide, inner, attention = language.hidden_size, language.usual.ffn_hidden_size, language.attentions[0]
    head, groups = attention.head_dim, attention.kv_heads
    widths = {  # (in, out) of query-key-value, projection, and the perceptron's two
        "vit": [(vision.hidden_size, 3 * vision.hidden_size), (vision.hidden_size, vision.hidden_size),
                (vision.hidden_size, vision.ffn_hidden_size), (vision.ffn_hidden_size, vision.hidden_size)],
        "llm": [(wide, wide + 2 * groups * head), (wide, wide), (wide, 2 * inner), (inner, wide)],
        "head": [(wide, language.vocab_size)],
    }  # fmt: skip
    rows = {"vit": late_bytes.TILES * vision.tokens_per_tile, "llm": late_bytes.TOKENS, "head": late_bytes.TOKENS}
    by_hand = {kind: rows[kind] * sum(map(sum, layers)) * number for kind, layers in widths.items()}
    others = {"untouched": 0, "whole": [[False, False], [True]]}
    assert run_program("tests.distributed.late_bytes", 1, server=machine) == by_hand | others


def test_a_gpu_keeps_a_reserve_for_what_no_layer_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver and communicators take now, and at least what a job's take. What the allocator keeps of layers
    that were measured is none of it."""
    assert platform.overhead_bytes() == 0
    monkeypatch.setattr(platform, "HAS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10 * 2**30)
    for used, reserve in ((11 * 2**30, 4 * 2**30), (19 * 2**30, 9 * 2**30)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda used=used: (80 * 2**30 - used, 80 * 2**30))
        assert platform.overhead_bytes() == reserve


def test_what_recomputing_adds_is_added_to_both_ways() -> None:
    """Forward 2 and backward 3 seconds, and 2.5 and 6 with recomputation: 3.5 more."""
    measurement = SimpleNamespace(packs=[None], _run=lambda mode, pack: lambda: (2.5, 6.0))
    added = KindMeasurement._recompute_run(measurement, "whole", lambda: (2.0, 3.0))  # type: ignore[arg-type]
    assert added() == (3.5,)
