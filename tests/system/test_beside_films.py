"""A model of two encoders before one projector, as a user starts it: in every layout the losses of one process, which
fall."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from omnibal_ext.plan import Plan, StagePlan
from omnibal_ext.run_metrics import training_intervals
from tests.programs import tool
from tests.system.families import build
from tests.unit.data.clips import TURNS

pytest.importorskip("av")
pytest.importorskip("transformers")
pytestmark = pytest.mark.starts
LINKS = {"film=beside,vision=cut": "patch_embed", "beside": "word_embed"}
STEPS, FEW = 12, 4
"""Of the run whose losses fall, and of those that are compared with it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Video-LLaVA; conversations about an image, a video, both, and neither; their dataset and packs."""
    folder = tmp_path_factory.mktemp("filming")
    tool("make_demo_data.py", "--output-dir", folder / "made", "--samples", 12, "--heldout-samples", 2)
    build("video-llava", folder / "made", folder)
    image = f"demo/images/{min(path.name for path in (folder / 'made/images').iterdir())}"
    turns = [{**TURNS[0], "value": f"<image>{TURNS[0]['value']}"}, TURNS[1]]
    both = {"image": image, "video": "film.mp4", "conversations": turns}
    films = (folder / "films.jsonl").read_text()
    (folder / "films.jsonl").write_text("\n".join([films, json.dumps(both)] * 3))
    inputs = ("--input", folder / "demo/train.jsonl", folder / "films.jsonl", "--micro-batches", 2)
    tool("launch.py", *words(folder, "prepared", 2, planned("cut")), *inputs, "--dry-run")
    manifest = json.loads((folder / "prepared/data/manifest.json").read_text())
    assert manifest["sources"][1]["samples"] == 9
    return folder


def planned(layout: str) -> tuple[object, ...]:
    return ("--tower", layout, "--analytic", "h100")


def words(folder: Path, run: str, ranks: int, plan: tuple[object, ...]) -> tuple[object, ...]:
    """So many pipeline ranks."""
    said = ("--model", folder / "model", "--run-dir", folder / run, *plan)
    return (*said, "--nproc-per-node", ranks, "--pipeline-model-parallel-size", ranks)


def losses(folder: Path, run: str, ranks: int, plan: tuple[object, ...], steps: int = FEW) -> list[float]:
    """Of a run over the packs that are there."""
    made = ("--data", folder / "prepared/data", "--packs", folder / "prepared/packs-by-size", "--no-logit-check")
    trainer = ("--train-iters", steps, "--lr", "3e-3", "--lr-decay-iters", 2 * STEPS, "--log-interval", 1)
    tool("launch.py", *words(folder, run, ranks, plan), *made, "--", *trainer, "--save-interval", steps)
    return [line["loss"] for line in training_intervals(folder / run / "metrics.jsonl")]


def test_losses_fall_and_are_those_of_one_process_wherever_the_chain_is_cut(folder: Path) -> None:
    one = losses(folder, "one", 1, planned("cut"), STEPS)
    assert len(one) == STEPS
    assert sum(one[-3:]) < 0.8 * sum(one[:3])
    plan = Plan.load(folder / "prepared/plan.json")
    chain, between = plan.chain, plan.chain.index("patch_embed")
    stages = (StagePlan((0, between)), StagePlan((between, len(chain))))
    replace(plan, stages=stages, schedule="1f1b", lists=()).save(folder / "between.json")
    cut = losses(folder, "between", 2, ("--plan", folder / "between.json"))
    assert cut == pytest.approx(one[:FEW], rel=1e-5)
    for layout, end in LINKS.items():
        assert losses(folder, layout, 2, planned(layout)) == pytest.approx(one[:FEW], rel=1e-5), layout
        tower = Plan.load(folder / layout / "plan.json").tower
        assert tower is not None
        assert chain[tower.layers] == end
