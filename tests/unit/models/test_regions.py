"""Layers that are compiled regions compute what the same layers do uncompiled, or are not compiled."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.vlm import core_patches
from megatron.vlm.arguments import TrainingInputs
from megatron.vlm.models import region
from megatron.vlm.models.attention import core_attention
from megatron.vlm.models.chain import Chain
from megatron.vlm.models.region import Region
from megatron.vlm.pipeline.weight_gradients import WeightGradients
from megatron.vlm.profiling.layer_costs import KindMeasurement
from tests.distributed import harness
from tests.programs import ROOT, environment

ALIKE = ("dense", "recomputed", "adapted", "native", "windows", "mixture", "apart", "marked")
LONG = ("frozen", "gated", "samples", "half")
REFUSED = ("broken", "backward broken", "backward wrong", "copied")


@pytest.fixture(scope="module")
def found(is_long: bool) -> dict[str, dict[str, Any]]:
    """Of every case of the program, in one start."""
    command = [sys.executable, "-P", "-W", "ignore", str(ROOT / "tests/unit/models/regions.py")]
    command += [*ALIKE, *REFUSED, "marked later", *(LONG if is_long else ())]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-3000:]
    answer: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.starts
def test_losses_and_gradients_are_those_of_uncompiled_layers(found: dict[str, dict[str, Any]]) -> None:
    """Tiles, images at native resolution, dense layers, recomputed, frozen, with adapters; gradients in `main_grad` of
    two iterations, in which some packs have masks (`windows`) and run their layers as they are."""
    differences = {name: one["difference"] for name, one in found.items()}
    assert differences.pop("half", 0) < 0.05
    assert {name: one for name, one in differences.items() if one > 1e-5} == {}


@pytest.mark.starts
def test_packs_of_other_sizes_compile_nothing_anew(found: dict[str, dict[str, Any]]) -> None:
    """Nor do further layers of a kind: one graph, another for one tile alone, each twice where layers are computed
    again; and where the first layer's input has no gradient."""
    assert {name: one["more"] for name, one in found.items() if one["more"]} == {}
    graphs = {name: one["graphs"] for name, one in found.items()}
    assert graphs.pop("recomputed") == 6
    assert graphs.pop("adapted") == 5
    assert graphs.pop("marked later") == 6
    assert max(graphs.values()) == 3
    assert graphs["apart"] == 0


@pytest.mark.starts
def test_what_trains_is_what_was_tried(found: dict[str, dict[str, Any]]) -> None:
    """Also where small functions, which mark rows of what they are given, saw the inputs before; where trials do not
    see the marks (`marked later`) the compiler is given other graphs than theirs, which are not used."""
    assert {name: one["untried"] for name, one in found.items() if one["untried"]} == {}
    assert {name: len(found[name]["said"]) for name in ALIKE} == {name: found[name]["graphs"] for name in ALIKE}
    later = found["marked later"]
    assert later["difference"] == 0
    assert later["said"][-1].endswith("run uncompiled: what is compiled for a call is not what is for a trial")


@pytest.mark.starts
def test_a_layer_is_one_call(found: dict[str, dict[str, Any]]) -> None:
    """Beside those that try it; two where it is computed again. Those that are none are not called."""
    calls = {name: one["calls"] for name, one in found.items()}
    assert all(1 < calls[name] < 1.05 for name in ("dense", "adapted", "native"))
    assert 2 < calls["recomputed"] < 2.1
    assert all(0 < calls[name] < 0.6 for name in ("windows", "mixture"))
    assert calls["apart"] == 0


@pytest.mark.starts
def test_what_fails_or_gives_other_numbers_is_not_used(found: dict[str, dict[str, Any]]) -> None:
    """A compiler that fails at once, or at what runs backward; one that gives wrong gradients; one that would have
    gradients go to copies of the weights. Each kind of layer is tried once, and said to run uncompiled."""
    for name in REFUSED:
        assert found[name]["difference"] == 0, name
        assert found[name]["calls"] < 0.05, name
        said = found[name]["said"]
        assert len(said) == 3
        assert all(line.startswith("rank 0: layers of ") and " run uncompiled: " in line for line in said)
    forms = [line.rpartition(" rows, ")[2] for line in found["recomputed"]["said"]]
    assert forms == ["without gradients)", "with gradients)"] * 3
    others = (line for name, one in found.items() if name not in (*REFUSED, "marked later") for line in one["said"])
    assert all(" are compiled: " in line for line in others)


@pytest.fixture
def chain(inputs: TrainingInputs, monkeypatch: pytest.MonkeyPatch) -> Chain:
    """As where there is CUDA, and regions are asked for: products add gradients, and a kernel attends over packs."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")
    monkeypatch.setattr(core_attention, "choose_kernel", lambda *_: "variable_length")
    chain = harness.build_chain(inputs.args, harness.SMALL)
    for config in chain.configs.values():
        config.gradient_accumulation_fusion = True
    return chain


def layers_of(chain: Chain, kind: str) -> list[int]:
    return [layer for layer, its in enumerate(chain.kinds) if its == kind]


def test_layers_of_one_kind_share_a_region_and_chains_do_not(chain: Chain) -> None:
    vit, llm = ([chain.build(layer).region for layer in layers_of(chain, kind)[:2]] for kind in ("vit", "llm"))
    assert isinstance(vit[0], Region)
    assert vit[0] is vit[1]
    assert llm[0] is llm[1]
    assert vit[0] is not llm[0]
    assert replace(chain).build(layers_of(chain, "llm")[0]).region is not llm[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_model_parallel_size": 2}, {"hidden_dropout": 0.1}, {"attention_dropout": 0.1}, {"fp8": "hybrid"},
        {"transformer_impl": "transformer_engine"}, {"gradient_accumulation_fusion": False},
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["vit", "llm"])
def test_layers_that_exchange_draw_or_do_not_add_are_no_regions(
    chain: Chain, kind: str, changes: dict[str, Any]
) -> None:
    layer: Any = chain.build(layers_of(chain, kind)[0])
    assert region.is_fit(layer)
    for name, value in changes.items():
        setattr(layer.config, name, value)
    assert not region.is_fit(layer)


def test_layers_that_keep_less_or_delay_gradients_are_no_regions(chain: Chain) -> None:
    first = layers_of(chain, "llm")[0]
    assert chain.build(first, recompute=True).region is None
    layer = chain.build(first)
    WeightGradients().attach(layer)
    assert layer.region is None


def test_megatrons_switch_of_compiled_functions_is_theirs_too(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import jit

    monkeypatch.setattr(jit, "jit_fuser", jit.noop_decorator)
    assert chain.build(layers_of(chain, "llm")[0]).region is None


@pytest.mark.parametrize("given", [None, "1", ""])
def test_only_who_asks_has_regions(chain: Chain, monkeypatch: pytest.MonkeyPatch, given: str | None) -> None:
    layer: Any = chain.build(layers_of(chain, "llm")[0])
    assert region.is_fit(layer)
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    if given is not None:
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", given)
    assert not region.is_fit(layer)


def test_what_layers_keep_is_measured_as_where_they_are_no_regions(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan may have a schedule, or a tower, that has none, and they keep less: no plan promises too little."""
    seen: list[bool] = []
    monkeypatch.setattr(Region, "_by_tried", lambda *_: seen.append(region._is_watched()))
    monkeypatch.setattr(Region, "_passes", lambda *_: True)
    KindMeasurement(harness.get_args(), chain, "vit", {"tiles": 2, "tokens": 16})
    assert seen
    assert not any(seen)


def raises(error: Exception) -> Callable[..., Tensor]:
    def launch(*_: Any) -> Tensor:
        raise error

    return launch


def test_what_fails_later_runs_uncompiled_unless_memory_is_short(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layer: Any = chain.build(layers_of(chain, "vit")[0])
    hidden = torch.randn(34, 1, 32)
    layer.region._passed = {(grads, False, False): True for grads in (True, False)}
    monkeypatch.setattr(layer.region, "_launch", raises(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        layer.region(layer, hidden, None)
    monkeypatch.setattr(layer.region, "_launch", raises(RuntimeError("no such kernel\n")))
    assert layer.region(layer, hidden, None) is None
    assert layer.region(layer, hidden, None) is None
    assert capsys.readouterr().out == "rank 0: layers of VisionLayer as number 1 run uncompiled: no such kernel\n"


def test_under_hooks_on_what_autograd_keeps_layers_run_as_they_are(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their backward would be given other tensors than the weights that have `main_grad`."""
    layer: Any = chain.build(layers_of(chain, "vit")[0])
    layer.region._passed, layer.region._tried = {(True, False, False): True}, {None}
    monkeypatch.setattr(layer.region, "_launch", lambda *_: torch.ones(1))
    hidden = torch.randn(34, 1, 32)
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept.detach(), lambda kept: kept):
        assert layer.region(layer, hidden, None) is None
    assert layer.region(layer, hidden, None) is not None


def test_a_trial_that_lacks_memory_ends_no_run(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layer: Any = chain.build(layers_of(chain, "vit")[0])
    monkeypatch.setattr(layer.region, "_launch", raises(torch.OutOfMemoryError("full")))
    assert layer.region(layer, torch.randn(34, 1, 32), None) is None
    assert set(layer.region._passed.values()) == {False}
    assert capsys.readouterr().out == "rank 0: layers of VisionLayer as number 1 run uncompiled: no memory to try\n"


@pytest.mark.parametrize("grads", [True, False])
def test_a_trial_makes_no_more_gradients_than_it_compares(chain: Chain, grads: bool) -> None:
    layer: Any = chain.build(layers_of(chain, "vit")[0])
    layer.self_attention.requires_grad_(False)
    for weight in layer.parameters():
        weight.main_grad = torch.zeros_like(weight)
    seen: dict[str, bool] = {}

    def as_it_is(its: Any, inputs: Any, weights: Any) -> Tensor:
        seen.update((name, hasattr(one, "main_grad")) for name, one in zip(its.tensors, weights, strict=True))
        return region._as_it_is(its, inputs, weights)

    with torch.set_grad_enabled(grads):
        region._outcome(as_it_is, layer, (torch.randn(34, 1, 32), (), ()))
    wanted = {name for name, one in layer.named_parameters() if one.requires_grad} if grads else set()
    assert {name for name, has in seen.items() if has} == wanted


@pytest.mark.parametrize("helps", [True, False])
def test_an_output_by_a_graph_that_was_not_tried_is_dropped_until_it_is(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, helps: bool
) -> None:
    layer: Any = chain.build(layers_of(chain, "vit")[0])
    one, ran = layer.region, []
    one._passed, one._tried = {(True, False, False): True}, {"first"}

    def launch(*_: Any) -> Tensor:
        one._ran = "second"
        ran.append("launched")
        return torch.full((1,), len(ran))

    def passes(*_: Any) -> bool:
        ran.append("tried")
        one._tried |= {"second"} if helps else set()
        return True

    monkeypatch.setattr(one, "_launch", launch)
    monkeypatch.setattr(one, "_passes", passes)
    out = one(layer, torch.randn(34, 1, 32), None)
    assert ran == ["launched", "tried", *["launched"] * helps]
    assert out == 3 if helps else out is None
    assert one._passed == {(True, False, False): helps}


def test_weights_that_are_gathered_are_waited_for(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron waits in hooks of the modules that hold weights, which a region does not call."""
    seen: list[torch.nn.Module] = []
    layer: Any = chain.build(layers_of(chain, "vit")[0])
    layer.mlp.linear_fc1.register_forward_pre_hook(lambda module, _: seen.append(module))
    layer.region._passed, layer.region._tried = {(True, False, False): True}, {None}
    monkeypatch.setattr(layer.region, "_launch", lambda *_: torch.ones(1))
    layer.region(layer, torch.randn(34, 1, 32), None)
    assert seen == [layer.mlp.linear_fc1]
    layer.mlp.linear_fc1.register_forward_pre_hook(lambda _, given: given[0])  # one that wants what a module is given
    assert layer.region(layer, torch.randn(34, 1, 32), None) is None


def test_a_weight_that_takes_anothers_place_is_read(chain: Chain) -> None:
    layer: Any = chain.build(layers_of(chain, "llm")[0])
    names = {name for name, _ in (*layer.named_parameters(), *layer.named_buffers())}
    assert set(layer.tensors) == names
    linear = layer.mlp.linear_fc1
    linear.weight = torch.nn.Parameter(torch.ones_like(linear.weight))
    assert layer.tensors["mlp.linear_fc1.weight"] is linear.weight


@pytest.mark.parametrize("seed", range(2))
def test_the_gradients_of_products_are_added_or_given(seed: int) -> None:
    """What autograd is given instead shares one memory, which grows to the largest."""
    region.UNREAD.clear()
    generator = torch.Generator().manual_seed(seed)
    unread = []
    for columns in (4, 2, 6):
        weight: Any = torch.nn.Parameter(torch.randn(3, columns, generator=generator))
        grad, rows = (torch.randn(5, width, generator=generator) for width in (3, columns))
        of_rows, of_weight = torch.ops.omnibal.gradients(grad, rows, weight, False)
        assert torch.allclose(of_rows, grad @ weight)
        assert torch.allclose(of_weight, grad.t() @ rows)
        with pytest.raises(RuntimeError, match="has no main_grad to go to"):
            torch.ops.omnibal.gradients(grad, rows, weight, True)
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(3, columns), False
        _, dummy = torch.ops.omnibal.gradients(grad, rows, weight, True)
        assert weight.grad_added_to_main_grad
        assert torch.allclose(weight.main_grad, 1 + of_weight)
        unread.append(dummy)
        apart = [dummy, *(core_patches.added_already(weight) for _ in range(2))]  # core's layers share none
        assert len({one.data_ptr() for one in apart}) == 3
        assert dummy.shape == weight.shape
    assert unread[0].data_ptr() == unread[1].data_ptr() != unread[2].data_ptr()
    assert region.UNREAD[torch.float32, unread[0].device].numel() == 18


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_what_is_no_number_is_no_region(wrong: float) -> None:
    """Also beside others: of several differences the largest counts."""
    assert region._apart(torch.tensor([wrong]), torch.ones(1)) > 1e30
    assert region._apart(torch.tensor([1.0, 1.5]), torch.tensor([1.0, 1.0])) == pytest.approx(0.5 / 2**0.5)
