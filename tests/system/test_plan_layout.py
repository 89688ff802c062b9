"""tools/plan_layout.py as a command: its table, its one JSON object, its file, its refusals."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.chain import KINDS
from omnibal_ext.costs.profile import LayerCost, Profile
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.plan import Plan
from omnibal_ext.sizes import Sizes
from tests.chains import layer_chain
from tests.long import short
from tests.programs import refusal, tool


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    costs = {kind: LayerCost(0.01, 0.02, 2e8, 1e7, 1e8, 1e6) for kind in KINDS}
    path = tmp_path / "profile.json"
    Profile("tiny", "aa", layer_chain(4, 4), costs, {"tiles": 4, "tokens": 128}, dict.fromkeys(KINDS, 7)).save(path)
    return path


def _run(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    return tool("plan_layout.py", *arguments, check=check)


def test_writes_the_plan_it_prints(profile: Path, tmp_path: Path) -> None:
    common = ("--profile", profile, "--pipeline-model-parallel-size", 2, "--num-microbatches", 4, "--memory-gib", 3)
    ran = _run(*common, "--method", "bmp", "--output", tmp_path / "plan.json", "--json")
    printed = json.loads(ran.stdout)
    plan = Plan.load(tmp_path / "plan.json")
    assert plan == Plan.from_record(printed)
    assert set(printed["predicted"]) >= {"step_seconds", "bubble_fraction", "stage_seconds", "stage_peak_bytes"}
    table = _run(*common, "--method", "profile", "--output", tmp_path / "plan.json")
    assert "vit.0" in table.stdout
    assert "of the ideal" in table.stdout


def test_judges_on_the_packs_of_an_index(profile: Path, tmp_path: Path) -> None:
    sizes = Sizes.from_arrays(np.arange(100) % 5, np.arange(100) % 90 + 1)
    build_index(sizes, tmp_path / "packs", PackOptions("isf", 4, 128, micro_batches=2, data_parallel_size=2))
    common = ("--profile", profile, "--pipeline-model-parallel-size", 2, "--num-microbatches", 2, "--json")
    usual, real = tmp_path / "usual.json", tmp_path / "real.json"
    _run(*common, "--output", usual)
    _run(*common, "--packs", tmp_path / "packs", "--output", real)
    assert Plan.load(real).predicted["step_seconds"] < Plan.load(usual).predicted["step_seconds"]


def test_sweep_plans_the_fastest_setting_and_lists_the_others(tmp_path: Path) -> None:
    Sizes.from_arrays(np.arange(800) % 4 + 1, np.arange(800) % 400 + 1100).save(tmp_path / "sizes.npz")
    flags = "--sweep --analytic a100 --model internvl-chat-1.5 --gpus 16 --global-batch-samples 32 --budgets 9x4096"
    small = "--tensor-sizes 2 --pipeline-sizes 2,4 --chunks 1 --schedules 1f1b,zb_h1 --memory-gib 56 --seconds 0.2"
    files = ("--sizes", tmp_path / "sizes.npz", "--output", tmp_path / "plan.json")
    ran = _run(*flags.split(), *small.split(), *files)
    assert "TP 2 PP 4 DP 2, zb_h1 x 1" in ran.stdout
    assert "no plan for TP 2 PP 2 DP 4, 1f1b x 1, 9 tiles 4096 tokens: " in ran.stdout
    assert Plan.load(tmp_path / "plan.json").pipeline_model_parallel_size == 4


MODELS = {
    "qwen3-vl-8b": (2, 1, 67),
    "qwen3-vl-30b-a3b": (2, 8, 79),
    "internvl3.5-30b-a3b": (4, 1, 76),
    "qwen3.5-35b-a3b": (2, 8, 71),
}
"""Of each tensor- and expert-parallel size, and its layers."""


@pytest.mark.parametrize("name", short(MODELS, ("internvl3.5-30b-a3b", "qwen3.5-35b-a3b")))
def test_plans_a_model_on_an_analytic_device_and_says_what_of_the_ideal_it_reaches(tmp_path: Path, name: str) -> None:
    tensor, experts, layers = MODELS[name]
    shape = "--pipeline-model-parallel-size 4 --num-microbatches 8 --memory-gib 72 --seconds 0.2"
    tiles = 16 if name.startswith("internvl") else 16384
    usual = ("--analytic", "h100", "--model", name, "--budgets", f"{tiles}x8192", *shape.split())
    usual = (*usual, "--output", tmp_path / "plan.json")
    ran = _run(*usual, "--tensor-sizes", tensor, "--expert-sizes", experts)
    assert "of the ideal" in ran.stdout
    plan = Plan.load(tmp_path / "plan.json")
    assert (plan.model, plan.tensor_model_parallel_size, plan.stages[-1].layers[1]) == (name, tensor, layers)
    assert plan.expert_model_parallel_size == experts


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--memory-gib", 0.5), "over the limit of 0.50 GiB"),
        (("--num-microbatches", 1), "one microbatch keeps one of 2 pipeline ranks busy"),
        (("--method", "joint", "--recompute", "full"), "leave out --recompute full"),
        (("--schedule", "gpipe"), "never the fastest; use 1f1b"),
        (("--profile", "BAD"), "layer vit: forward_seconds is nan"),
        (
            ("--analytic", "h100", "--model", "qwen3-vl-8b", "--budgets", "16384x8192"),
            "--tensor-sizes and --expert-sizes take one each",
        ),
    ],
)
def test_what_cannot_be_planned_ends_with_one_line_and_code_2(
    profile: Path, tmp_path: Path, flags: tuple[object, ...], message: str
) -> None:
    record = json.loads(profile.read_text())
    record["layers"]["vit"]["forward_seconds"] = float("nan")
    record.pop("manifest_hash")
    (tmp_path / "bad.json").write_text(json.dumps(record))
    given = () if "--analytic" in flags else ("--profile", profile)
    usual = (*given, "--pipeline-model-parallel-size", 2, "--num-microbatches", 4)
    flags = tuple(tmp_path / "bad.json" if flag == "BAD" else flag for flag in flags)
    assert message in refusal(_run(*usual, "--output", tmp_path / "plan.json", *flags, check=False))
    assert not (tmp_path / "plan.json").exists()


def test_a_budget_of_mel_frames_counts_without_sizes(tmp_path: Path) -> None:
    model = "--analytic h100 --model qwen2.5-omni-3b --budgets 2304x4096 --tensor-sizes 1"
    common = f"{model} --pipeline-model-parallel-size 2 --num-microbatches 4 --memory-gib 70 --method profile --json"
    steps = {}
    for frames in (None, 6000):
        given = ("--audio-budget", frames) if frames else ()
        plan = json.loads(_run(*common.split(), *given, "--output", tmp_path / f"{frames}.json").stdout)
        steps[frames] = plan["predicted"]["step_seconds"]
        assert plan["audio_budget"] == (frames or 1)
    assert steps[None] < steps[6000]
