"""The parts of the verdict on a GPU run on the CPU too: what is right is passed, what is wrong is not."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_parts
from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import DEVICES, analytic_profile
from omnibal_ext.costs.measured import device_key, efficiencies, measured_device
from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError
from tests.programs import ENGINE, PLAIN, run_ranks

pytestmark = pytest.mark.starts
PROGRAM = "benchmarks.gpu_parts"


def result(machine: str, ranks: int, *arguments: str) -> Any:
    said = run_ranks(PROGRAM, ranks, arguments, server=machine)
    return json.loads(next(line for line in said.splitlines() if line.startswith("RESULT ")).removeprefix("RESULT "))


@pytest.fixture(scope="module", params=[PLAIN, ENGINE], ids=["local", "engine"])
def machine(request: pytest.FixtureRequest) -> str:
    """Without Transformer Engine, or with it."""
    kind: str = request.param
    return kind


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the CPU finds, to which Transformer Engine does not count."""
    path = tmp_path_factory.mktemp("gpu") / "expected.pt"
    result(PLAIN, 1, "answers", str(path))
    return path


def test_the_small_chain_differs_by_its_rounding_alone(machine: str, expected: Path, tmp_path: Path) -> None:
    known, found = gpu_parts.Answers.load(expected), {}
    for name, flags in (("fp32 chain", ()), ("bf16 chain", ("--bf16",))):
        result(machine, 1, "answers", str(tmp_path / "found.pt"), "--weights", str(expected), *flags)
        answers = gpu_parts.Answers.load(tmp_path / "found.pt")
        found[name] = gpu_parts.difference(answers.gradients, known.gradients)
        assert len(answers.gradients) == len(answers.weights) == len(known.gradients)
    assert found["fp32 chain"] < 1e-6 if machine == ENGINE else found["fp32 chain"] == 0.0
    assert 1e-4 < found["bf16 chain"] < 0.05
    assert not gpu.out_of_limits(found)
    name = next(iter(known.gradients))
    known.gradients[name][:] += 1.0
    assert gpu.out_of_limits({"fp32 chain": gpu_parts.difference(answers.gradients, known.gradients)})


def test_two_ranks_by_way_of_the_host_find_the_same(machine: str, expected: Path) -> None:
    found = result(machine, 2, "pipeline", str(expected))
    assert len(found) == 3
    assert max(found.values()) < 1e-5


def test_every_kind_of_layer_has_its_figures(machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = result(machine, 1, "layers", "tiny", "6", "96", "1", *["--bf16"] * (machine == ENGINE))
    profile = Profile.from_record(found["profile"])
    figures = gpu.layer_figures(found, "tiny")
    assert {(row["kind"], row["mode"]) for row in figures} >= {("vit", "recompute"), ("llm", "-"), ("head", "-")}
    assert len(figures) == len(profile.layers) + 2 * len(gpu.MODES)
    vit = next(row for row in figures if (row["kind"], row["mode"]) == ("vit", "-"))
    tiny = preset("tiny").vision
    a_tile = tiny.tokens_per_tile
    matrices = 4 * tiny.hidden_size**2 + 2 * tiny.hidden_size * tiny.ffn_hidden_size
    by_hand = 6 * a_tile * (2 * matrices + 4 * tiny.hidden_size * a_tile)
    seconds = (vit["forward_ms"] + vit["backward_ms"]) / 1e3
    assert vit["tflops"] * 1e12 * seconds == pytest.approx(3 * by_hand, rel=1e-3)
    assert min(found["reached"].values()) > 0
    full = {**found, "allocated_bytes": {"vit": profile.layers["vit"].kept_bytes * 1.3}}
    assert gpu.byte_difference(full) == pytest.approx(0.3)
    differences = {"bytes": gpu.byte_difference(full), "pipeline": float("nan")}
    assert len(gpu.out_of_limits(differences)) == 2
    report = {"device": "this CPU", "versions": gpu.installed(), "layers": figures, "differences": differences}
    gpu.show({**found, **report, "model": "tiny"})
    assert ("transformer_engine" if machine == ENGINE else "sample_by_sample") in capsys.readouterr().out


def test_without_cuda_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    with pytest.raises(UserError, match="no CUDA device"):
        gpu.main()


def test_analytic_profiles_prefer_what_was_measured(tmp_path: Path) -> None:
    device = DEVICES["h200"]
    reached = {"matrix_flops": device.flops / 2, "attention_flops": device.flops / 4,
               "memory_bytes_a_second": device.memory_bandwidth * 0.9}  # fmt: skip
    assert device_key("NVIDIA H200") == "h200"
    assert device_key("NVIDIA L4") is None
    assert measured_device("h200", tmp_path) is None
    (tmp_path / "h200.json").write_text(json.dumps({"efficiencies": efficiencies("h200", reached)}))
    measured = measured_device("h200", tmp_path)
    assert measured is not None
    assert (measured.matrix_efficiency, measured.attention_efficiency) == (0.5, 0.25)
    assert measured.bandwidth_efficiency == pytest.approx(0.9)
    internvl = preset("internvl-chat-1.5")
    found = analytic_profile(internvl, "h200", 9, 4096, measured=measured)
    assert found.notes["matrix_efficiency"] == 0.5
    (tmp_path / "h200.json").write_text(json.dumps({"efficiencies": {"matrix_efficiency": 2.0}}))
    with pytest.raises(UserError, match=r"h200\.json.*attention_efficiency"):
        measured_device("h200", tmp_path)
