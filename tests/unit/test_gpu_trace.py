"""What a trace says is what ran: of the real profiler on a CPU, and of events made by hand as a GPU has them."""

import json
import subprocess
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import gpu, gpu_trace, gpu_ways
from benchmarks.gpu_trace import MARK, Kernel, Reach, Trace
from benchmarks.gpu_ways import BATCH
from megatron.vlm import platform
from megatron.vlm.models.attention.core_attention import ImageAttention, TileAttention
from omnibal_ext.costs.operations import EFFICIENCIES, measured_device
from tests.programs import PLAIN, result_of, run_ranks
from tests.unit.models.test_attention import HEADS, WIDTH, config

PER_LAYER = {"vit": 4, "llm": 4}
"""Products of a layer, forward; the gradients are two each."""
LAYERS = {"vit": 4, "llm": 3}
"""Of the model that is traced."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of three iterations."""
    folder = tmp_path_factory.mktemp("traced")
    return result_of(run_ranks("tests.unit.traced", 1, (str(folder),), server=PLAIN))


@pytest.mark.starts
def test_the_table_holds_all_that_ran(found: Any) -> None:
    """All seconds of operators, which the profiler's file gives another way; and the idle rest."""
    rows = [row for row in found["rows"] if "within" not in row]
    idle = [row["ms"] for row in rows if row["how"] == "idle"]
    milliseconds = sum(row["ms"] for row in rows) * found["packs"]
    assert found["operators"] == pytest.approx(found["spans"], rel=0.03)
    assert milliseconds - sum(idle) * found["packs"] == pytest.approx(found["operators"] * 1e3, rel=1e-6)
    assert milliseconds == pytest.approx(found["seconds"] * 1e3, rel=1e-6)
    assert len(rows) <= len(found["rows"]) <= 25, "with attention two ways 30"


@pytest.mark.starts
def test_kernels_belong_to_their_layers_and_passes(found: Any) -> None:
    """Every product of a layer, as often as packs and layers say, and as the device of shapes counts."""
    products: dict[str, int] = defaultdict(int)
    for name, number in found["launched"].items():
        group, _, kernel = name.partition(": ")
        products[group] += number * (kernel in ("aten::mm", "aten::addmm"))
    for kind, number in PER_LAYER.items():
        forward = number * LAYERS[kind] * found["packs"]
        assert (products[f"{kind} forward"], products[f"{kind} backward"]) == (forward, 2 * forward)
        for phase, passes in (("forward", 1), ("backward", 2)):
            kernels, operations, _ = found["counted"][f"{kind} {phase} product"]
            assert kernels * found["packs"] / len(found["tiles"]) == passes * forward
            assert operations > 0


@pytest.mark.starts
def test_what_comes_behind_the_layers_is_of_none(found: Any) -> None:
    """Gradients are reduced at the end of an iteration, where nothing overlaps."""
    groups = {name.partition(": ")[0] for name in found["launched"] if "reduce_scatter" in name}
    assert groups == {"step"}
    assert found["untraced"] > 0


@pytest.mark.starts
def test_attention_is_asked_for_by_tiles_and_lengths(found: Any) -> None:
    """In fp32 on a CPU samples go one by one, as those with masks do: a shape for each number of tiles and length."""
    assert found["shapes"] == len(set(found["tiles"])) + len(set(found["lengths"]))


def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CPU, **more: Any) -> Any:
    """Of the profiler; microseconds."""
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    known = {"is_user_annotation": name.startswith(MARK), "kernels": [], "input_shapes": [], "self_cpu_time_total": 0.0}
    return SimpleNamespace(name=name, device_type=device, time_range=span, **{**known, **more})


def launch(name: str, start: float, *kernels: tuple[str, float], **more: Any) -> Any:
    """An operator and what it launches, with microseconds."""
    launched = [SimpleNamespace(name=kernel, duration=taken) for kernel, taken in kernels]
    return event(name, start, start + more.pop("takes", 1.0), kernels=launched, **more)


PLAN = "aten::_scaled_dot_product_cudnn_attention"
BY_HAND = [
    event(MARK + "vit forward", 10, 10), launch("aten::mm", 11, ("nvjet_tst", 30.0)),
    launch(PLAN, 13, ("cudnn_sdpa_flash_fprop", 20.0), takes=23_000.0),
    launch("aten::scaled_dot_product_attention", 12, input_shapes=[[6, 4, 5, 8]]),
    event(MARK + "vit backward", 30_000, 30_000), launch("aten::mm", 30_002, ("sm90_gemm", 7.0), ("splitKreduce", 1.0)),
    launch(PLAN + "_backward", 30_004, ("cudnn_sdpa_bprop", 9.0), takes=40.0),
    launch("aten::scaled_dot_product_attention", 30_005, input_shapes=[[6, 4, 5, 8]]),
    event(MARK + "step", 31_000, 31_000), event("Optimizer.step#Adam", 31_001, 31_010, is_user_annotation=True,
          kernels=[SimpleNamespace(name="Optimizer.step#Adam", duration=500.0)]),
    launch("aten::_foreach_add_", 31_003, ("vectorized_elementwise", 4.0)),
    event("nvjet_tst", 100, 130, DeviceType.CUDA), event("cudnn_sdpa_flash_fprop", 120, 140, DeviceType.CUDA),
    event("Optimizer.step#Adam", 200, 700, DeviceType.CUDA), event("vectorized_elementwise", 690, 694, DeviceType.CUDA),
]  # fmt: skip
"""Spans overlap; a span of an annotation on the device is no kernel."""


def test_a_kernel_belongs_to_the_mark_that_the_host_passed_last() -> None:
    """Whenever it runs."""
    trace = gpu_trace.trace_of(BY_HAND, 1, 1.0)
    assert [(name, kernel.name, kernel.work) for name, kernel in trace.named()] == [
        ("vit forward", "nvjet_tst", "product"), ("vit forward", "cudnn_sdpa_flash_fprop", "attention"),
        ("vit backward", "sm90_gemm", "product"), ("vit backward", "splitKreduce", "product"),
        ("vit backward", "cudnn_sdpa_bprop", "attention"), ("step", "vectorized_elementwise", "elementwise"),
    ]  # fmt: skip
    assert trace.idle == pytest.approx(1 - 44e-6)
    assert (trace.shapes, trace.loose) == (1, 0.0)


def test_a_kernel_that_nobody_asked_for_has_a_row() -> None:
    lost = [event("nvjet_tst", 140, 150, DeviceType.CUDA), event("Memset", 800, 805, DeviceType.CUDA)]
    trace = gpu_trace.trace_of([*BY_HAND, *lost], 1, 1.0)
    assert trace.loose == pytest.approx(15e-6)
    rows = gpu_trace.rows(trace, {}, 1, None)
    assert {row["how"]: row["ms"] for row in rows if row["what"] == "device"} == pytest.approx(
        {"idle": 1e3 - 59e-3, "not linked": 15e-3}
    )


def test_seconds_of_the_host_are_none_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "HAS_CUDA", True)
    monkeypatch.setattr(gpu_trace, "supported_activities", lambda: {gpu_trace.ProfilerActivity.CUDA})
    with pytest.raises(RuntimeError, match="recorded no kernels"):
        gpu_trace.trace_of([launch("aten::mm", 11)], 1, 1.0)


def test_what_is_not_explained_is_what_lies_beyond_the_least() -> None:
    reach = Reach(products=2e6, bytes=1e6, attention={"vit": 1e6})
    asked = {("vit forward", "product"): [8.0, 40.0, 10.0], ("vit forward", "attention"): [4.0, 10.0, 5.0],
             ("vit backward", "product"): [8.0, 2.0, 4.0]}  # fmt: skip
    rows = gpu_trace.rows(gpu_trace.trace_of(BY_HAND, 1, 1e-3), asked, 2, reach)
    least = {(row["what"], row["how"]): row["least ms"] for row in rows if "least ms" in row}
    assert least == pytest.approx({("vit forward", "product"): 1e-2, ("vit forward", "attention"): 5e-3,
                                   ("vit backward", "product"): 2e-3})  # fmt: skip
    assert gpu_trace.not_explained([{"what": "llm forward", "how": "product", "ms": 1.0, "least ms": 1.5}]) == {}
    beyond = gpu_trace.not_explained(rows)
    assert beyond["vit forward product"] == pytest.approx(30e-3 - 1e-2)
    assert beyond["step elementwise"] == pytest.approx(4e-3)
    assert beyond["device idle"] == pytest.approx(1 - 44e-3)
    assert list(beyond.values()) == sorted(beyond.values(), reverse=True)


WAYS = {BATCH: {"ms": 2.0, "first ms": 34.0}, "tiles: rows": {"ms": 3.0, "first ms": 3.5},
        "a masked sample: torch's choice": {"ms": 1.0, "first ms": 30.0},
        "a masked sample: memory-efficient": {"ms": 2.0, "first ms": 2.0}}  # fmt: skip


def test_plans_take_what_a_new_size_takes_longer() -> None:
    """The traced iterations repeat their packs: they build none."""
    (plans,) = (row for row in gpu_trace.of_ways(WAYS, 4) if row["what"].startswith("plans"))
    assert (plans["how"], plans["ms"]) == ("4 shapes, 32.0 ms each", 128.0)


def test_counting_that_takes_too_long_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def dawdles(*_: object, **named: Any) -> None:
        raise subprocess.TimeoutExpired("launches", named["timeout"])

    monkeypatch.setattr(gpu_trace.subprocess, "run", dawdles)
    assert gpu_trace.counted("tiny", Path("packs.json"), 2, 5.0) == {}


def test_a_trace_stays_whatever_comes_behind_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And goes beside what the record and the card's have already."""
    record, of_card, size = tmp_path / "h200.json", tmp_path / "h200-tiny.json", gpu.SHORT
    known = {"device": "NVIDIA H200", "model": size.model, "budgets": size.budgets, "packs": size.packs}
    shares = dict.fromkeys(EFFICIENCIES, 0.5)
    earlier = {**known, "efficiencies": shares, "differences": {"bytes": 0.01}, "seconds": {"layers": 9.0}}
    record.write_text(json.dumps(earlier))
    of_card.write_text(json.dumps({"model": "tiny", "TFLOP/s": 290.0, "trace": "unverified"}))
    (tmp_path / "packs.json").write_text("[[[2, 40]]]")
    done: Future[Any] = Future()
    done.set_result(True)

    def ways(*_: object) -> None:
        raise torch.OutOfMemoryError

    trace = replace(gpu_trace.trace_of(BY_HAND, 1, 1.0), packs=2)
    monkeypatch.setattr(gpu, "PACKS", "packs.json")
    monkeypatch.setattr(gpu_trace, "counted", lambda *_: {})
    monkeypatch.setattr(gpu_trace, "traced", lambda *_: gpu_trace.Traced(trace, 0.5, {"llm": "cudnn"}, None))
    monkeypatch.setattr(gpu_ways, "ways", ways)
    verdict = gpu.Verdict(size, inf, tmp_path, known, aside={"packs": done}, before=gpu.earlier(record, known))
    assert list(gpu.run_all(verdict, record, ("trace",))) == ["trace failed"]
    found, card = (json.loads(path.read_text()) for path in (record, of_card))
    assert (found["efficiencies"], found["differences"]) == (shares, {"bytes": 0.01})
    assert found["seconds"].keys() == {"layers", "trace"}
    assert (found["trace"]["milliseconds a pack"], found["trace"]["not traced"]) == (500.0, 250.0)
    assert found["trace"]["rows"]
    assert (card["TFLOP/s"], card["trace"]["rows"]) == (290.0, found["trace"]["rows"])
    assert measured_device("h200", tmp_path) is not None
    assert gpu.earlier(record, {**known, "model": "another"}) == {}
    record.write_text(json.dumps({"trace": {}}))
    assert measured_device("h200", tmp_path) is None


def test_small_groups_are_one_row() -> None:
    marks = [(float(number), f"kind{number} forward") for number in range(40)]
    kernels = [Kernel(number + 0.5, "elementwise", float(number)) for number in range(40)]
    rows = gpu_trace.rows(Trace(marks, kernels, 1, 1e3, 0.0, 0.0, 0), {}, 1, None)
    (others,) = (row for row in rows if row["what"] == "others")
    assert others["ms"] == sum(range(40 - gpu_trace.MOST_GROUPS)) * 1e3
    assert len(rows) + len(gpu_trace.of_ways(WAYS, 3)) == 30
    assert len(gpu_trace.shown(rows)) == len(rows)


@pytest.mark.parametrize(("name", "kernel", "native", "vit", "llm"), [
    ("NVIDIA H200", "variable_length", False, 0.38, 0.23), ("NVIDIA H100 80GB", "flash_attention_4", True, 0.46, 0.46),
    ("NVIDIA A100-SXM4", "flash_attention", False, 0.50, 0.50),
])  # fmt: skip
def test_attention_reaches_what_its_kernel_does(name: str, kernel: str, native: bool, vit: float, llm: float) -> None:
    reach = Reach.of(name, {"llm": kernel, "vit": kernel if native else "cudnn"}, 5e14)
    assert reach is not None
    flops = 312e12 if "A100" in name else 989e12
    assert reach.least(("vit backward", "attention"), vit * flops, 0) == pytest.approx(1)
    assert reach.least(("llm forward", "attention"), llm * flops, 0) == pytest.approx(1)
    assert reach.least(("llm forward", "product"), 5e14, 0) == pytest.approx(1)
    assert f"llm {llm * flops / 1e12:.0f} ({kernel})" in reach.source
    assert Reach.of("NVIDIA L4", {}) is None


@pytest.mark.parametrize("tiles", [1, 3, 7])
def test_tiles_by_rows_are_tiles_in_a_batch(tiles: int) -> None:
    """Outputs and gradients; here by the same product, elsewhere by a kernel for packs."""
    tokens, generator = 5, torch.Generator().manual_seed(tiles)
    given = [torch.randn(tokens * tiles, 1, HEADS, WIDTH, generator=generator).requires_grad_() for _ in range(3)]
    toward = torch.randn(tokens * tiles, 1, HEADS * WIDTH, generator=generator)
    ways = TileAttention(config(), tokens), lambda *qkv: gpu_ways.by_rows(ImageAttention(config()), tokens, *qkv)
    a, b = ([out, *torch.autograd.grad(out, given, toward)] for out in (way(*given) for way in ways))
    assert all(torch.allclose(x, y, atol=1e-6, rtol=0) for x, y in zip(a, b, strict=True))
