"""The parts of the verdict on a GPU run on the CPU too: what is right is passed, what is wrong is not."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bare, gpu, gpu_answers, gpu_cards, gpu_packs
from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import DEVICES, analytic_profile
from omnibal_ext.costs.operations import device_key, measured_device
from omnibal_ext.errors import UserError
from tests.long import short
from tests.programs import ENGINE, PLAIN, ROOT, fresh_python, result_of, run_ranks

pytestmark = pytest.mark.starts
PROGRAM = "benchmarks.gpu_parts"


def result(machine: str, ranks: int, *arguments: str) -> Any:
    return result_of(run_ranks(PROGRAM, ranks, arguments, server=machine))


@pytest.fixture(scope="module", params=short([PLAIN, ENGINE], [PLAIN]), ids=["local", "engine"])
def machine(request: pytest.FixtureRequest) -> str:
    """With Transformer Engine or without; the long suite runs them on cards too (tests/cards/test_cards.py)."""
    kind: str = request.param
    return kind


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what the CPU finds, to which Transformer Engine does not count."""
    folder = tmp_path_factory.mktemp("gpu")
    result(PLAIN, 1, "expected", str(folder))
    return folder


def test_the_parts_run_in_one_process(machine: str, folder: Path, tmp_path: Path) -> None:
    """Those that need no GPU, on the CPU: one after the other, each as if it were alone; what differs is rounding."""
    found = result_of(run_ranks("tests.unit.gpu_parts", 1, (str(folder), str(tmp_path)), server=machine))
    differences = found["differences"]
    assert found["said"] == []
    ran = {"answers", "layers", "training", "against", "trace", "text", "resume", "peers", "lora"}
    assert found["seconds"].keys() == ran
    assert 0 < len(found["trace"]["rows"]) <= 30
    assert differences["fp32 chain"] < 1e-6 if machine == ENGINE else differences["fp32 chain"] == 0.0
    assert 1e-4 < differences["bf16 chain"] < 0.05
    assert differences["resume"] == 0.0
    assert differences["loss"] < 0.0
    assert set(found["against"]["parts"]) >= {f"{part} {phase}" for part in ("vit", "projector", "llm", "head")
                                              for phase in ("forward", "backward")}  # fmt: skip
    assert set(found["peers"]["useful tokens a second"]) == {"one at a time", "padded", "packs"}
    assert min(found["reached"].values()) > 0


def test_two_ranks_by_way_of_the_host_find_the_same(machine: str, folder: Path) -> None:
    found = result(machine, 2, "pipeline", str(folder))
    assert len(found) == len(gpu_answers.SCHEDULES)
    assert max(found.values()) < 1e-5


def test_every_kind_of_layer_has_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    profile = analytic_profile(preset("tiny"), "h100", {"tiles": 6, "tokens": 96})
    found = {"profile": profile.to_record(), "reached": {"peak_flops": 1e15}}
    figures = gpu.layer_figures(found, "tiny")
    assert {(row["kind"], row["mode"]) for row in figures} >= {("vit", "recompute"), ("llm", "-"), ("head", "-")}
    assert len(figures) == len(profile.layers) + 2 * len(gpu.MODES)
    vit = next(row for row in figures if (row["kind"], row["mode"]) == ("vit", "-"))
    tiny, a_tile = preset("tiny").vision, preset("tiny").vision.tokens_per_tile
    matrices = 4 * tiny.hidden_size**2 + 2 * tiny.hidden_size * tiny.ffn_hidden_size
    by_hand = 6 * a_tile * (2 * matrices + 4 * tiny.hidden_size * a_tile)
    seconds = (vit["forward_ms"] + vit["backward_ms"]) / 1e3
    assert vit["tflops"] * 1e12 * seconds == pytest.approx(3 * by_hand, rel=1e-3)
    full = {**found, "allocated_bytes": {"vit": profile.layers["vit"].kept_bytes * 1.3}}
    assert gpu.byte_difference(full) == pytest.approx(0.3)
    differences = {"bytes": gpu.byte_difference(full), "pipeline": float("nan")}
    assert len(gpu.out_of_limits(differences)) == 2
    gpu.show_layers({**found, "model": "tiny", "layers": figures})
    assert "recompute_cheap" in capsys.readouterr().out


def test_packs_are_as_conversations_are() -> None:
    """Within the budgets, words and images; the seed says which."""
    packs = gpu_packs.make_packs(preset("internvl3.5-2b"), (33, 11840), 8)
    assert len(packs) >= 8
    sums = [tuple(map(sum, zip(*pack, strict=True))) for pack in packs]
    assert all(tiles <= 33 and tokens <= 11840 for tiles, tokens in sums)
    samples = [sample for pack in packs for sample in pack]
    assert 0.1 < sum(tiles == 0 for tiles, _ in samples) / len(samples) < 0.3
    assert packs == gpu_packs.make_packs(preset("internvl3.5-2b"), (33, 11840), 8)
    read = gpu_packs.RandomPacks("tiny", (((2, 20), (0, 9)), ((1, 30),)))[2]
    assert (read.media_of("tiles").amount, read.lengths, read.pack) == (2, (20, 9), 0)
    assert read.supervised is not None
    assert read.supervised.tolist() == [14, 15, 16, 17, 18, 19, 27, 28]


def test_without_cuda_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gpu.py"])
    with pytest.raises(UserError, match="no CUDA device"):
        gpu.main()


CHOSEN = {"heads of 64": "transformer_engine, variable_length", "heads of 256": "variable_length, variable_length"}


@pytest.mark.parametrize(
    ("found", "worst"),
    [
        ({"transformer_engine 64": 0.01, "variable_length 64": 0.03, "variable_length 256": 0.02}, 0.03),
        ({"transformer_engine 64": 0.01, "transformer_engine 256": "refused: x", "variable_length 256": 0.02}, 0.02),
        ({"transformer_engine 64": 0.01, "variable_length 256": "refused: no kernel"}, math.inf),
        ({}, 0.0),
    ],
)
def test_a_kernel_may_refuse_what_it_is_not_chosen_for(found: dict[str, Any], worst: float) -> None:
    assert gpu.worst_attention(found, CHOSEN) == worst


def test_parts_fail_and_run_out_of_time_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was found before is written, and what comes behind runs while there is time."""
    clock = [0.0]
    monkeypatch.setattr(gpu.time, "monotonic", lambda: clock[0])

    def finds(verdict: gpu.Verdict) -> None:
        verdict.found["figure"], verdict.differences["bytes"] = 3, 0.05
        clock[0] += 40

    def fails(_: gpu.Verdict) -> None:
        raise RuntimeError("out of memory")

    def dawdles(_: gpu.Verdict) -> None:
        clock[0] += 17
        raise subprocess.TimeoutExpired("a part", 17)

    def lacks(_: gpu.Verdict) -> None:
        raise ModuleNotFoundError("no transformers", name="transformers")

    parts = {"finds": finds, "fails": fails, "lacks": lacks, "dawdles": dawdles, "late": finds}
    monkeypatch.setattr(gpu, "PARTS", parts)
    verdict = gpu.Verdict(gpu.SHORT, 60.0, tmp_path, {"device": "a GPU"})
    said = list(gpu.run_all(verdict, tmp_path / "results/gpu.json", tuple(parts)))
    assert said == ["fails failed", "lacks did not run: transformers is not installed here",
                    "dawdles took longer than there was time", "late did not run: no time was left"]  # fmt: skip
    written = json.loads((tmp_path / "results/gpu.json").read_text())
    assert (written["figure"], written["differences"]) == (3, {"bytes": 0.05})
    assert written["seconds"] == {"finds": 40, "fails": 0, "lacks": 0, "dawdles": 17}


WITHOUT = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *how: None if name.partition(".")[0] in {missing!r} else find(name, *how)
sys.argv = ["gpu_parts", "expected", {path!r}]
import runpy
runpy.run_module("benchmarks.gpu_parts", run_name="__main__")
from omnibal_ext import console
console.print_table("a table", ("what", "figure"), [("one", 1)])
"""


def test_parts_run_where_torch_and_megatron_core_are_all_there_is(tmp_path: Path) -> None:
    """What only plans, prints or reads data may be missing."""
    asked = WITHOUT.format(missing=[name for name in bare.OPTIONAL if name != "psutil"], path=str(tmp_path))
    done = fresh_python("-W", "ignore", "-c", asked)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "RESULT " in done.stdout
    assert done.stdout.endswith("a table\nwhat  figure\none   1\n")


def test_analytic_profiles_prefer_what_was_measured(tmp_path: Path) -> None:
    device = DEVICES["h200"]
    reached = {"matrix_flops": device.flops / 2, "attention_flops": device.flops / 4,
               "memory_bytes_a_second": device.memory_bandwidth * 0.9}  # fmt: skip
    assert (device_key("NVIDIA H200"), device_key("NVIDIA L4"), measured_device("h200", tmp_path)) == (
        "h200",
        None,
        None,
    )
    (tmp_path / "h200.json").write_text(json.dumps({"efficiencies": gpu.efficiencies("h200", reached)}))
    measured = measured_device("h200", tmp_path)
    efficiencies = measured.matrix_efficiency, measured.attention_efficiency, measured.bandwidth_efficiency
    assert efficiencies == (0.5, 0.25, pytest.approx(0.9))
    found = analytic_profile(preset("internvl-chat-1.5"), "h200", {"tiles": 9, "tokens": 4096}, measured=measured)
    assert found.notes["matrix_efficiency"] == 0.5
    (tmp_path / "h200.json").write_text(json.dumps({"efficiencies": {"matrix_efficiency": 2.0}}))
    with pytest.raises(UserError, match=r"h200\.json.*attention_efficiency"):
        measured_device("h200", tmp_path)


def test_documents_show_what_cards_did() -> None:
    """docs/gpu.md has the table that the records give, and README its figures; every field of a record is said."""
    found = gpu_cards.cards()
    assert found
    assert gpu_cards.table(found) in (ROOT / "docs/gpu.md").read_text()
    assert all(tuple(one) == gpu_cards.FIELDS for one in found)
    (h200,) = (one for one in found if one["card"] == "NVIDIA H200")
    (row,) = (line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| one H200"))
    assert f"{round(h200['useful tokens a second'], -2):,.0f} useful" in row
    assert f"MFU {h200['MFU']:.2f}".replace("0.", ".") in row
    assert f"{h200['share of text-only TFLOP/s']:.2f} of".removeprefix("0") in row
