"""A run whose conversations and images lie in a store is the run of the local folder, over resumes, through faults."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import store
from tests.programs import refusal, tool
from tests.system.families import save_model

store.required()
pytest.importorskip("transformers")
ITERATIONS, BEGUN = 4, 2


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[store.Store]:
    """A store of conversations and images, beside a model."""
    folder = tmp_path_factory.mktemp("stored")
    with store.running(folder / "s3") as running:
        demo = running.root / "seen"
        tool("make_demo_data.py", "--output-dir", demo, "--samples", 48, "--heldout-samples", 4)
        save_model("qwen3-vl", folder / "model", demo / "tokenizer.model")
        yield running


def launch(
    stored: store.Store, place: object, run: Path, *more: object, check: bool = True, tiles: Path | None = None
) -> Any:
    words = ("--model", stored.root.parents[1] / "model", "--input", f"{place}/seen/train.jsonl")
    words = (*words, "--image-root", f"{place}/seen", "--run-dir", run, "--nproc-per-node", 2, "--analytic", "a100")
    words = (*words, "--cache-tiles", tiles) if tiles else words
    return tool(
        "launch.py", *words, "--", "--train-iters", ITERATIONS, "--log-interval", 1, "--save-interval", BEGUN,
        "--num-workers", 4, *more, check=check,
    )  # fmt: skip


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def due(stored: store.Store, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of the run of the local folder."""
    run = tmp_path_factory.mktemp("local") / "run"
    launch(stored, stored.root, run)
    assert len(losses(run)) == ITERATIONS
    return losses(run)


def texts(run: Path) -> str:
    """All that a run has written, as far as it is text."""
    endings = (".json", ".jsonl", ".log", ".html", ".txt")
    return "".join(path.read_text(errors="replace") for path in run.rglob("*") if path.suffix in endings)


@pytest.mark.starts
def test_losses_are_the_local_folders_over_a_resume_and_through_faults(
    stored: store.Store, due: list[float], tmp_path: Path
) -> None:
    draw = random.Random(0)
    passing = [("status", 500.0), ("status", 503.0), ("cut", 0.5), ("slow", 0.3)]
    stored.fault = lambda number, key: draw.choice(passing) if draw.random() < 0.1 else None
    run, said = tmp_path / "run", ""
    try:
        said += "".join(map(str, vars(launch(stored, stored.url, run, "--exit-interval", BEGUN)).values()))
        said += "".join(map(str, vars(launch(stored, stored.url, run)).values()))
    finally:
        stored.fault = lambda number, key: None
    assert losses(run) == due
    assert stored.most > 1
    written = texts(run) + said
    assert "weighs nothing" not in written
    assert store.KEY not in written
    assert store.SECRET not in written


@pytest.mark.starts
def test_losses_with_cached_tiles_are_the_same_over_a_resume(
    stored: store.Store, due: list[float], tmp_path: Path
) -> None:
    """From the store, with a folder of tiles that has entries, lacks some, and has damaged ones."""
    run, tiles = tmp_path / "run", tmp_path / "tiles"
    launch(stored, stored.url, run, "--exit-interval", BEGUN, tiles=tiles)
    kept = sorted(tiles.glob("*/*"))
    assert kept
    for number, path in enumerate(kept):
        content = path.read_bytes()
        path.write_bytes(content[: len(content) - number % 3])
    for path in kept[::4]:
        path.unlink()
    launch(stored, stored.url, run, tiles=tiles)
    assert losses(run) == due
    assert "weighs nothing" not in texts(run)
    assert {*kept[::4]} & {*tiles.glob("*/*")}
    line = refusal(launch(stored, stored.root, tmp_path / "new", check=False, tiles=tmp_path / "run/metrics.jsonl"))
    assert "metrics.jsonl is a file" in line


@pytest.mark.starts
def test_refused_keys_end_the_run_in_a_line(stored: store.Store, tmp_path: Path) -> None:
    stored.fault = lambda number, key: ("status", 400.0) if "images" in key else None
    try:
        line = refusal(launch(stored, stored.url, tmp_path / "other", check=False))
    finally:
        stored.fault = lambda number, key: None
    assert "ExpiredToken" in line
    assert store.SECRET not in line


@pytest.mark.starts
def test_only_conversations_and_images_may_lie_in_a_store(stored: store.Store, tmp_path: Path) -> None:
    for more, word in (
        (("--save", f"{stored.url}/save"), "--save"),
        (("--cache-tiles", stored.url), "--cache-tiles"),
        (("--enable-msc",), "--enable-msc"),
    ):
        line = refusal(launch(stored, stored.root, tmp_path / "run", *more, check=False))
        assert word in line
        assert "stay on a file system" in line
    line = refusal(launch(stored, stored.root, Path(f"{stored.url}/run"), check=False))
    assert "--run-dir" in line


def test_a_look_at_a_store_reads_no_image_whole(stored: store.Store) -> None:
    stored.seen.clear()
    words = (f"{stored.url}/seen/train.jsonl", "--model", stored.root.parents[1] / "model", "--json")
    far = json.loads(tool("look.py", *words).stdout)
    asked = [line for line in stored.seen if "images/" in line]
    assert len(asked) <= 1.2 * len({line.partition("?")[0] for line in asked})
    local = json.loads(tool("look.py", stored.root / "seen/train.jsonl", *words[1:]).stdout)
    assert {**far, "commands": []} == {**local, "commands": []}


@pytest.mark.parametrize("name", ["sizes.npz", "data"])
def test_sizes_and_datasets_in_a_store_are_refused_with_the_reason(stored: store.Store, name: str) -> None:
    (stored.root / "data").mkdir(exist_ok=True)
    for path in ("sizes.npz", "data/sizes.npz"):
        (stored.root / path).write_bytes(b"any")
    line = refusal(tool("look.py", f"{stored.url}/{name}", check=False))
    assert f"{stored.url}/{name}" in line
    assert "stay on a file system" in line


@pytest.mark.starts
def test_a_dataset_of_a_store_is_trained_on_only_if_the_command_line_names_it(
    stored: store.Store, due: list[float], tmp_path: Path
) -> None:
    """After its first run: from dataset and packs alone, without and with the store."""
    launch(stored, stored.url, tmp_path / "run", "--exit-interval", 1)
    model = stored.root.parents[1] / "model"
    words = ("--model", model, "--data", tmp_path / "run/data", "--packs", tmp_path / "run/packs-by-size")
    words = (*words, "--run-dir", tmp_path / "other", "--nproc-per-node", 2, "--analytic", "a100")
    further = ("--", "--train-iters", 1, "--lr", 1e-5, "--log-interval", 1)
    stored.seen.clear()
    line = refusal(tool("launch.py", *words, *further, check=False))
    assert f"{stored.url}: is named by a file" in line
    assert not stored.seen
    tool("launch.py", *words, "--stores", stored.url, *further)
    assert stored.seen
