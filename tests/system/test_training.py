"""Training as a user starts it: saved, resumed and resumed in another layout it goes on as if nothing had happened."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from omnibal_ext.architectures import preset
from omnibal_ext.plan import Plan

ROOT = Path(__file__).parents[2]
TINY = preset("tiny")


def tool(name: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(ROOT / "tools" / name), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done


def make_dataset(folder: Path, samples: int) -> None:
    """Demo conversations, preprocessed into `folder`/data."""
    tool("make_demo_data.py", "--output-dir", folder / "demo", "--samples", samples, "--heldout-samples", 4)
    sources = ("--input", folder / "demo/train.jsonl", "--image-root", folder / "demo")
    text = ("--tokenizer-model", folder / "demo/tokenizer.model", "--chat-template", "internlm2-chat")
    tiles = ("--tile-size", 32, "--tokens-per-tile", 4, "--max-tiles", 32)
    tool("preprocess_data.py", *sources, *text, *tiles, "--output-dir", folder / "data")


def pack(folder: Path, micro_batches: int, output: str) -> None:
    """Pack `folder`/data into `folder`/`output`."""
    budgets = ("--vit-budget", 40, "--llm-budget", 320, "--micro-batches", micro_batches)
    tool("pack_data.py", "--data", folder / "data", "--method", "isf", *budgets, "--output-dir", folder / output)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 64 conversations, packed for iterations of 4 packs."""
    folder = tmp_path_factory.mktemp("training")
    make_dataset(folder, samples=64)
    pack(folder, micro_batches=4, output="packs")
    Plan.from_cuts(TINY.chain, (4,), [(2,), (7,)], model="tiny", model_hash=TINY.hash).save(folder / "two.json")
    Plan.from_cuts(TINY.chain, (), model="tiny", model_hash=TINY.hash).save(folder / "one.json")
    chunks = Plan.from_cuts(TINY.chain, (3, 5, 9), model="tiny", model_hash=TINY.hash, schedule="zb_h1",
                            virtual_pipeline_model_parallel_size=2)  # fmt: skip
    chunks.save(folder / "chunks.json")
    return folder


def train(
    folder: Path, run: str, plan: str, pipeline: int, iterations: int, *flags: str, model: str = "tiny"
) -> list[dict[str, float]]:
    """Train on two ranks, from random weights unless --load names some; the metrics of every iteration."""
    scratch = () if "--load" in flags else ("--from-scratch",)
    tool(
        "launch.py", "--preset", model, "--data", folder / "data", "--packs", folder / "packs",
        "--run-dir", folder / run, "--plan", folder / plan, "--nproc-per-node", 2, *scratch,
        "--pipeline-model-parallel-size", pipeline, "--", "--train-iters", iterations, "--lr", "1e-3",
        "--lr-decay-iters", "4", "--log-interval", "1", *flags,
    )  # fmt: skip
    return [json.loads(line) for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> list[dict[str, float]]:
    checkpoints = str(folder / "checkpoints")
    return train(folder, "whole", "two.json", 2, 4, "--save", checkpoints, "--save-interval", "2")


@pytest.mark.parametrize(
    ("plan", "pipeline"),
    [("two.json", 2), ("one.json", 1), ("chunks.json", 2)],
    ids=["same layout", "other layout", "chunks and zero bubble"],
)
def test_resuming_goes_on_with_the_same_data_and_loss(
    folder: Path, uninterrupted: list[dict[str, float]], plan: str, pipeline: int
) -> None:
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(folder, f"resumed-{plan}", plan, pipeline, 4, "--load", str(folder / "checkpoints"))
    assert [line["iteration"] for line in resumed] == [3, 4]
    for line, expected in zip(resumed, uninterrupted[2:], strict=True):
        assert line["samples"] == expected["samples"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_the_distributed_optimizer_resumes_without_apex_or_transformer_engine(folder: Path) -> None:
    checkpoints = str(folder / "distributed")
    flags = ("--use-distributed-optimizer", "--save-interval", "2")
    whole = train(folder, "distributed-whole", "one.json", 1, 4, "--save", checkpoints, *flags)
    (folder / "distributed" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(folder, "distributed-resumed", "one.json", 1, 4, "--load", checkpoints, *flags)
    assert [line["loss"] for line in resumed] == pytest.approx([line["loss"] for line in whole[2:]], rel=1e-5)


def test_a_rank_on_which_nothing_trains_takes_part(folder: Path) -> None:
    """The ViT frozen, one rank has no optimizer; the loss is that of one stage."""
    plan = {"model": "tiny", "model_hash": TINY.hash, "frozen": ("vit", "projector")}
    Plan.from_cuts(TINY.chain, (5,), **plan).save(folder / "frozen-two.json")
    Plan.from_cuts(TINY.chain, (), **plan).save(folder / "frozen-one.json")
    flags = ("--freeze", "vit", "projector", "--use-distributed-optimizer", "--overlap-grad-reduce")
    two, one = (train(folder, f"frozen-{p}", f"frozen-{n}.json", p, 3, *flags) for p, n in ((2, "two"), (1, "one")))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], rel=1e-5)


def test_a_global_batch_that_breaks_the_position_is_refused(folder: Path, uninterrupted: object) -> None:
    pack(folder, micro_batches=3, output="packs-3")
    done = launch_error(folder, "--packs", folder / "packs-3", "--plan", folder / "one.json", "--", "--train-iters", 9,
                        "--lr", "1e-3", "--override-opt-param-scheduler", "--load", folder / "checkpoints")  # fmt: skip
    assert "--global-batch-size" in done


def complete(flags: tuple[object, ...]) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """The launcher's flags and Megatron's, with a learning rate and a length where those are not the matter."""
    split = flags.index("--") if "--" in flags else len(flags)
    ours, megatron = flags[:split], flags[split + 1 :]
    for flag, value in (("--lr", "1e-3"), ("--train-iters", 1)):
        megatron = megatron if flag in megatron else (*megatron, flag, value)
    return ours, megatron


def launch_error(folder: Path, *flags: object) -> str:
    """The one line with which launching is refused."""
    arguments = {
        "--preset": "tiny",
        "--data": folder / "data",
        "--packs": folder / "packs",
        "--run-dir": folder / "bad",
    }
    ours, megatron = complete(flags)
    ours = ours if "--load" in megatron else ("--from-scratch", *ours)
    words = [word for flag in arguments.items() if flag[0] not in flags for word in flag]
    done = tool("launch.py", *words, *ours, "--", *megatron, check=False)
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-2000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    return line


def test_an_unknown_preset_is_refused_with_the_known_ones(folder: Path) -> None:
    assert "internvl-chat-1.5" in launch_error(folder, "--preset", "gpt-5")


def test_a_plan_for_another_model_is_refused(folder: Path) -> None:
    other = preset("internvl-chat-1.5")
    path = folder / "other.json"
    Plan.from_cuts(other.chain, (40,), model=other.name, model_hash=other.hash).save(path)
    assert "internvl-chat-1.5" in launch_error(folder, "--plan", path, "--dry-run")


def test_a_plan_that_loses_a_layer_is_refused_by_its_name(folder: Path) -> None:
    record = json.loads((folder / "two.json").read_text())
    record["stages"][1]["layers"][0] += 1
    (folder / "lossy.json").write_text(json.dumps(record))
    assert "vit.3" in launch_error(folder, "--plan", folder / "lossy.json", "--dry-run")


def test_a_plan_with_other_frozen_parts_is_refused(folder: Path) -> None:
    assert "freeze" in launch_error(folder, "--plan", folder / "two.json", "--dry-run", "--", "--freeze", "vit")


def test_packs_of_another_dataset_are_refused(folder: Path) -> None:
    manifest = folder / "data/manifest.json"
    text = manifest.read_text()
    record = json.loads(text)
    record["tiling"]["max_tiles"] += 1
    manifest.write_text(json.dumps(record))
    try:
        assert "manifest.tiling.max_tiles is 32, expected 33" in launch_error(folder, "--dry-run")
    finally:
        manifest.write_text(text)


def test_dry_run_profiles_plans_and_shows_the_command(folder: Path) -> None:
    flags = ("--preset", "tiny", "--data", folder / "data", "--packs", folder / "packs", "--run-dir", folder / "dry")
    shape = ("--nproc-per-node", 2, "--pipeline-model-parallel-size", 2, "--dry-run", "--json", "--from-scratch", "--")
    shape = (*shape, "--train-iters", 1, "--lr", "1e-3")
    shown = json.loads(tool("launch.py", *flags, *shape).stdout)
    assert shown["command"][:3] == ["--standalone", "--nproc-per-node=2", "-m"]
    assert not shown["started"]
    Plan.load(folder / "dry/plan.json").check_model("tiny", TINY.hash)
    before = (folder / "dry/profile.json").stat().st_mtime_ns, (folder / "dry/plan.json").stat().st_mtime_ns
    tool("launch.py", *flags, *shape)  # nothing is stale: nothing is made again
    assert before == ((folder / "dry/profile.json").stat().st_mtime_ns, (folder / "dry/plan.json").stat().st_mtime_ns)
