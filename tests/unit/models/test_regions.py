"""Layers that are compiled regions compute what the same layers do uncompiled, or are not compiled."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megatron.vlm import core_patches
from megatron.vlm.arguments import TrainingInputs
from megatron.vlm.loss import token_loss, weigh_samples
from megatron.vlm.models import region
from megatron.vlm.models.attention import core_attention
from megatron.vlm.models.chain import Chain
from megatron.vlm.models.region import Region
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.pipeline.weight_gradients import WeightGradients
from megatron.vlm.profiling.layer_costs import KindMeasurement
from omnibal_ext.costs.profile import UNCOMPILED, Profile
from tests.distributed import harness
from tests.programs import ROOT, environment

ALIKE = ("dense", "recomputed", "adapted", "native", "windows", "mixture", "tower", "marked")
LONG = ("apart", "frozen", "gated", "samples", "half")
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
    """Tiles, images at native resolution, dense layers, recomputed, frozen, with adapters, of a replicated tower; sums
    of gradients of two iterations, in which some packs have masks (`windows`) and run their layers as they are."""
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
    assert graphs.pop("marked later") == 4
    assert max(graphs.values()) == 3


@pytest.mark.starts
def test_what_trains_is_what_was_tried(found: dict[str, dict[str, Any]]) -> None:
    """Also where small functions, which mark rows of what they are given, saw the inputs before; where trials are not
    marked alike (`marked later`) the compiler is given other graphs than theirs, which are not used."""
    assert {name: one["untried"] for name, one in found.items() if one["untried"]} == {}
    assert {name: len(found[name]["said"]) for name in ALIKE} == {name: found[name]["graphs"] for name in ALIKE}
    later = found["marked later"]
    assert later["difference"] == 0
    assert later["said"][-1].endswith("run uncompiled: what is compiled for a call is not what is for a trial")


@pytest.mark.starts
def test_a_layer_is_one_call(found: dict[str, dict[str, Any]]) -> None:
    """Beside those that try it; two where it is computed again. Those that are none are not."""
    calls = {name: one["calls"] for name, one in found.items()}
    assert all(1 < calls[name] < 1.05 for name in ("dense", "adapted", "native", "tower"))
    assert 2 < calls["recomputed"] < 2.1
    assert all(0 < calls[name] < 0.6 for name in ("windows", "mixture"))


@pytest.mark.starts
def test_what_fails_or_gives_other_numbers_is_not_used(found: dict[str, dict[str, Any]]) -> None:
    """A compiler that fails at once, or at what runs backward; one that gives wrong gradients; one that would have
    gradients go to copies of the weights. Each kind of layer is tried once, and said to run uncompiled."""
    for name in REFUSED:
        assert found[name]["difference"] == 0, name
        assert found[name]["calls"] < 0.05, name
        said = found[name]["said"]
        assert len(said) == 2
        assert all(line.startswith("rank 0: layers of ") and " run uncompiled: " in line for line in said)
    forms = [line.rpartition(" rows, ")[2] for line in found["recomputed"]["said"]]
    assert forms == ["without gradients)", "with gradients)"] * 3
    others = (line for name, one in found.items() if name not in (*REFUSED, "marked later") for line in one["said"])
    assert all(" are compiled (" in line for line in others)


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
        {"transformer_impl": "transformer_engine"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["vit", "llm"])
def test_layers_that_exchange_or_draw_are_no_regions(chain: Chain, kind: str, changes: dict[str, Any]) -> None:
    layer: Any = chain.build(layers_of(chain, kind)[0])
    assert region.is_fit(layer)
    for name, value in changes.items():
        setattr(layer.config, name, value)
    assert not region.is_fit(layer)


def test_layers_that_keep_less_or_delay_gradients_are_no_regions(chain: Chain) -> None:
    first = layers_of(chain, "llm")[0]
    assert chain.build(first, recompute=True).region is None
    layer = chain.build(first)
    for is_trained in (False, True):
        layer.requires_grad_(is_trained)
        WeightGradients().attach(layer)
        assert (layer.region is None) == is_trained


def test_megatrons_switch_of_compiled_functions_is_theirs_too(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import jit

    monkeypatch.setattr(jit, "jit_fuser", jit.noop_decorator)
    assert chain.build(layers_of(chain, "llm")[0]).region is None


WAYS = ("", "whole", "cheap", "adapted", "delayed")


def numbers(chain: Chain, model: str, way: str) -> list[Tensor]:
    """The loss and all gradients of packs of words, images and masks; which layers are regions comes first."""
    layers = tuple(layer for layer, kind in enumerate(chain.kinds) if kind in ("vit", "llm"))
    again = {"recompute" if way == "whole" else "recompute_cheap": layers} if way in ("whole", "cheap") else {}
    stage = harness.stirred(Stage(chain, 0, len(chain.kinds), **again))
    if way == "delayed":
        WeightGradients().attach(stage)
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))  # of one shape for all tests of a process
    total = torch.zeros(())
    for pack in harness.sample_packs(model=model):
        loss, *_ = token_loss("token", pack, stage(weigh_samples("token", pack)))
        loss.backward()
        total += loss.detach()
    regions = torch.tensor([getattr(one, "region", None) is not None for one in stage.modules()])
    return [regions, total, *(one.grad for one in stage.parameters() if one.grad is not None)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", ["small", "gemma", "gemma_4_moe", "glm", "linear", "mixture", "features"])
def test_layers_that_are_no_regions_run_to_the_bit_as_where_nobody_asks(
    inputs: TrainingInputs, monkeypatch: pytest.MonkeyPatch, model: str, way: str
) -> None:
    """Experts, linear attention, windows, masks, recomputed, with adapters, with delayed gradients; what could be a
    region passes by it."""
    monkeypatch.setattr(Region, "__call__", lambda *_: None)
    found = []
    for asked in "01":
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", asked)
        adapted = ("llm",) if way == "adapted" else ()
        chain = harness.build_chain(inputs.args, harness.MODELS[model], (), adapted)
        found.append(numbers(chain, model, way))
    (regions, *mine), (none, *others) = found
    # Words are attended to sample by sample here: of tiles alone attention is one operation.
    assert regions.any() == (model in ("small", "gemma") and way not in ("cheap", "delayed"))
    assert not none.any()
    assert len(mine) == len(others) > 1
    assert all(map(torch.equal, mine, others))


def test_a_call_leaves_products_as_they_were(chain: Chain) -> None:
    """Of frozen layers, which are regions, those of zero-bubble schedules have methods of their own."""
    layer: Any = chain.build(layers_of(chain, "vit")[0]).requires_grad_(False)
    linear = layer.mlp.linear_fc1
    linear._forward_impl = own = partial(linear._forward_impl)
    region._as_operations(layer, (torch.randn(34, 1, 32), (), ()), tuple(layer.tensors.values()), False)
    assert linear._forward_impl is own
    assert "_forward_impl" not in vars(layer.mlp.linear_fc2)


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
    monkeypatch.setattr(Region, "_compiled", lambda *_: seen.append(region._is_watched()))
    monkeypatch.setattr(Region, "_try", lambda self, *_: self._tried.add(None))
    KindMeasurement(harness.get_args(), chain, "vit", {"tiles": 2, "tokens": 16})
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_profile_says_what_layers_take_where_they_are_no_regions(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    """Zero-bubble schedules have none: F, and the host's seconds of F, and of B with W, were measured without."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "01"[not is_asked])
    monkeypatch.setattr(Region, "__call__", lambda *_: None)
    of_kind = KindMeasurement(harness.get_args(), chain, "vit", {"tiles": 2, "tokens": 16})
    assert of_kind.split is not None
    of_kind.split.timer = SimpleNamespace(host_seconds=(2.0, 4.0, 8.0))  # type: ignore[assignment]
    of_kind.timer = SimpleNamespace(host_seconds=(1.0, 1.0))  # type: ignore[assignment]
    seconds = {**dict.fromkeys("01", (3.0, 5.0)), "recompute": (1.0,), "recompute_cheap": (1.0,)}
    cost = of_kind.cost({**seconds, "split": (32.0, 3.0, 2.0)}, 1.0, 1.0)
    found = (cost.split_forward_seconds, cost.host_split_forward_seconds, cost.host_split_backward_seconds)
    assert found == ((16.0, 1.0, 6.0) if is_asked else (None, None, None))  # of two layers
    profile = Profile("tiny", "aa", ("vit",), {"vit": cost}, {"tiles": 2, "tokens": 16})
    record = profile.to_record()
    assert all((name in record["layers"]["vit"]) == is_asked for name in UNCOMPILED)  # other profiles are as they were
    assert Profile.from_record(record) == profile
    hosts = (1.0, 6.0) if is_asked else (0.5, 0.5)
    assert (cost.host_forward_seconds, cost.host_backward_seconds) == (0.5, 0.5)
    assert (cost.uncompiled.host_forward_seconds, cost.uncompiled.host_backward_seconds) == hosts


def raises(error: Exception) -> Callable[..., Tensor]:
    def launch(*_: Any) -> Tensor:
        raise error

    return launch


@pytest.mark.parametrize("error", [RuntimeError("no such kernel\n"), torch.OutOfMemoryError("no memory")])
@pytest.mark.parametrize("was_tried", [True, False])
def test_what_fails_runs_uncompiled_from_then_on(
    chain: Chain, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, was_tried: bool
) -> None:
    """Also where memory lacks for a trial: the layer alone may fit, and says itself where it does not."""
    layer: Any = chain.build(layers_of(chain, "vit")[0])
    layer.region._forms = {(True, False, False)} if was_tried else set()
    monkeypatch.setattr(layer.region, "_launch", raises(error))
    capsys.readouterr()
    for _ in range(2):
        assert layer.region(layer, torch.randn(34, 1, 32), None) is None
    why = str(error).strip()
    assert capsys.readouterr().out == f"rank 0: layers of VisionLayer as number 1 run uncompiled: {why}\n"


def test_under_hooks_on_what_autograd_keeps_layers_run_as_they_are(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their backward would be given other tensors than the weights that have `main_grad`."""
    layer: Any = chain.build(layers_of(chain, "vit")[0])
    layer.region._forms, layer.region._tried = {(True, False, False)}, {None}
    monkeypatch.setattr(layer.region, "_launch", lambda *_: torch.ones(1))
    hidden = torch.randn(34, 1, 32)
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept.detach(), lambda kept: kept):
        assert layer.region(layer, hidden, None) is None
    assert layer.region(layer, hidden, None) is not None


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
    one._forms, one._tried = {(True, False, False)}, {"first"}

    def launch(*_: Any) -> Tensor:
        one._ran = "second"
        ran.append("launched")
        return torch.full((1,), len(ran))

    def tries(*_: Any) -> None:
        ran.append("tried")
        one._tried |= {"second"} if helps else set()

    monkeypatch.setattr(one, "_launch", launch)
    monkeypatch.setattr(one, "_try", tries)
    out = one(layer, torch.randn(34, 1, 32), None)
    assert ran == ["launched", "tried", "launched"]
    assert out == 3 if helps else out is None
    assert (one(layer, torch.randn(34, 1, 32), None) is None) != helps
    assert ran.count("launched") == 2 + helps


def test_weights_that_are_gathered_are_waited_for(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron waits in hooks of the modules that hold weights, which a region does not call."""
    seen: list[torch.nn.Module] = []
    layer: Any = chain.build(layers_of(chain, "vit")[0])
    layer.mlp.linear_fc1.register_forward_pre_hook(lambda module, _: seen.append(module))
    layer.region._forms, layer.region._tried = {(True, False, False)}, {None}
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


@pytest.mark.parametrize(("is_fused", "has_sums", "grads"), list(product((True, False), repeat=3)))
def test_gradients_are_added_where_cores_products_add_them(
    chain: Chain, is_fused: bool, has_sums: bool, grads: bool
) -> None:
    layer: Any = chain.build(layers_of(chain, "vit")[0])
    layer.config.gradient_accumulation_fusion = is_fused
    for weight in layer.parameters() if has_sums else ():
        weight.main_grad = torch.zeros_like(weight)
    with torch.set_grad_enabled(grads):
        assert region._adds(layer, layer.tensors.values()) == (is_fused and has_sums and grads)


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
