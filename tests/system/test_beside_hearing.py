"""A model that hears with its encoders beside the pipeline, as a user starts it: the cut's losses, saves and report."""

import json
from pathlib import Path

import pytest

from omnibal_ext.plan import Plan
from omnibal_ext.run_metrics import evaluations, training_intervals
from tests.programs import tool
from tests.system.families import build

pytest.importorskip("transformers")
pytestmark = pytest.mark.starts
AUDIO_BESIDE = "audio=beside,vision=cut"
LINKS = {"beside": "word_embed", AUDIO_BESIDE: "patch_embed"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Qwen2.5-Omni, conversations with and without images and sounds, their dataset and packs."""
    folder = tmp_path_factory.mktemp("hearing")
    tool("make_demo_data.py", "--output-dir", folder / "made", "--samples", 24, "--heldout-samples", 2)
    build("qwen2.5-omni", folder / "made", folder)
    sounds = (folder / "sounds.jsonl").read_text()
    (folder / "sounds.jsonl").write_text("\n".join([sounds] * 4))
    inputs = ("--input", folder / "demo/train.jsonl", folder / "sounds.jsonl", "--micro-batches", 2, "--held-out", 0.2)
    tool("launch.py", *words(folder, "prepared", "cut"), *inputs, "--dry-run")
    return folder


def words(folder: Path, run: str, layout: str) -> tuple[object, ...]:
    """Two pipeline ranks."""
    ranks = ("--nproc-per-node", 2, "--pipeline-model-parallel-size", 2)
    return ("--model", folder / "model", "--run-dir", folder / run, "--tower", layout, "--analytic", "h100", *ranks)


def train(folder: Path, run: str, layout: str, *flags: object) -> dict[int, list[float]]:
    """Losses of two packs by iteration, with that of the held-out samples behind every other one."""
    data, packs, held_out = (folder / "prepared" / name for name in ("data", "packs-by-size", "packs-held-out"))
    made = ("--data", data, "--packs", packs, "--eval-data", data, "--eval-packs", held_out, "--no-logit-check")
    trainer = ("--train-iters", 4, "--lr", "1e-3", "--lr-decay-iters", 9, "--save-interval", 2, "--eval-interval", 2)
    tool("launch.py", *words(folder, run, layout), *made, "--", *trainer, "--log-interval", 1, *flags)
    metrics = folder / run / "metrics.jsonl"
    found = {line["iteration"]: [line["loss"]] for line in training_intervals(metrics)}
    for iteration, line in evaluations(metrics).items():
        found[iteration].append(line["loss"])
    return found


def alike(found: dict[int, list[float]], expected: dict[int, list[float]]) -> bool:
    return all(losses == pytest.approx(expected[iteration], rel=1e-6) for iteration, losses in found.items())


def test_losses_are_those_of_a_cut_pipeline_whichever_encoders_are_beside_it(folder: Path) -> None:
    """Evaluations too. And a run with both beside goes on, from its middle, with that of sounds alone."""
    cut, *others = (train(folder, name, name) for name in ("cut", *LINKS))
    assert [len(cut[iteration]) for iteration in sorted(cut)] == [1, 2, 1, 2]
    for name, losses in zip(LINKS, others, strict=True):
        assert losses.keys() == cut.keys()
        assert alike(losses, cut), name
        plan = Plan.load(folder / name / "plan.json")
        assert plan.tower is not None
        assert plan.chain[plan.tower.layers] == LINKS[name]
        done = tool("report.py", "--run", folder / name, "--output", folder / f"{name}.html", "--json")
        assert len(json.loads(done.stdout)["step_seconds"]) == 2, "predicted and measured"
    saves = folder / "beside/checkpoints"
    (saves / "latest_checkpointed_iteration.txt").write_text("2")
    again = train(folder, "again", AUDIO_BESIDE, "--load", saves)
    assert list(again) == [3, 4]
    assert alike(again, cut)
