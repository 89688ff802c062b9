"""A run goes on wherever its files lie by then: folders moved, copied, renamed, or named by another path."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from omnibal_ext.files.records import sha256_of, write_record
from omnibal_ext.reading.document import sealed
from tests.endurance.kills import tensors
from tests.long import short
from tests.programs import ROOT, refusal, tool
from tests.system.families import save_model

pytest.importorskip("transformers")
ITERATIONS, BEGUN = 4, 2


@dataclass(frozen=True)
class Places:
    """Where the files of a run lie."""

    run: Path
    model: Path
    data: Path
    images: Path

    @classmethod
    def below(cls, folder: Path) -> "Places":
        return cls(folder / "run", folder / "model", folder / "chat.jsonl", folder / "seen")

    def train(self, *more: object, check: bool = True) -> Any:
        words = ("--model", self.model, "--input", self.data, "--image-root", self.images, "--run-dir", self.run)
        words = (*words, "--held-out", 0.1, "--nproc-per-node", 1, "--analytic", "a100", *more)
        return tool(
            "launch.py", *words, *(() if "--" in more else ("--",)), "--train-iters", ITERATIONS, "--log-interval", 1,
            "--save-interval", BEGUN, check=check,
        )  # fmt: skip


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of which a run has trained half."""
    folder = tmp_path_factory.mktemp("begun") / "home"
    demo = folder / "seen"
    tool("make_demo_data.py", "--output-dir", demo, "--samples", 48, "--heldout-samples", 4)
    (demo / "train.jsonl").rename(folder / "chat.jsonl")
    save_model("qwen3-vl", folder / "model", demo / "tokenizer.model")
    Places.below(folder).train("--", "--exit-interval", BEGUN)
    return folder


Result = tuple[list[float], dict[str, bytes]]


def result(places: Places) -> Result:
    """The losses of all iterations, and the bytes of the last save's tensors."""
    lines = [json.loads(line) for line in (places.run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    saved = tensors(places.run / f"checkpoints/iter_{ITERATIONS:07}")
    return losses, {name: tensor.flatten().view(torch.uint8).numpy().tobytes() for name, tensor in saved.items()}


@pytest.fixture(scope="module")
def unmoved(begun: Path) -> Result:
    kept = begun.with_name("kept")
    shutil.copytree(begun, kept)
    begun.rename(begun.with_name("away"))
    kept.rename(begun)  # by its own path
    Places.below(begun).train()
    found = result(Places.below(begun))
    shutil.rmtree(begun)
    begun.with_name("away").rename(begun)
    assert len(found[0]) == ITERATIONS
    return found


def relative(there: Places) -> Places:
    return Places(*(Path(os.path.relpath(path, ROOT)) for path in vars(there).values()))


def linked(there: Places) -> Places:
    link = there.run.parent.with_name("link")
    link.symlink_to(there.run.parent)
    return Places.below(link)


def renamed(*names: str) -> Callable[[Places], Places]:
    def rename(there: Places) -> Places:
        for name in names:
            path: Path = getattr(there, name)
            path.rename(path.with_name(f"other-{path.name}"))
            there = replace(there, **{name: path.with_name(f"other-{path.name}")})
        return there

    return rename


WAYS: dict[str, Callable[[Places], Places]] = {
    "copied": lambda there: there,
    "by relative paths": relative,
    "through a link": linked,
    "another run": renamed("run"),
    "another model": renamed("model"),
    "other data": renamed("data"),
    "other images": renamed("images"),
    "all renamed": renamed("run", "model", "data", "images"),
}


@pytest.mark.parametrize("way", short(WAYS, ["all renamed"]))
def test_a_run_goes_on_bit_equal_wherever_its_files_are(way: str, begun: Path, unmoved: Result, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "elsewhere")
    begun.rename(begun.with_name("gone"))
    try:
        there = WAYS[way](Places.below(tmp_path / "elsewhere"))
        said = there.train("--check", "--json").stdout
        assert "unlike" not in said
        there.train()
        assert result(there) == unmoved
        page = tool("report.py", "--run", there.run, "--output", tmp_path / "page.html").stdout
        assert "error" not in page
    finally:
        begun.with_name("gone").rename(begun)


def test_a_run_noted_by_older_versions_goes_on_renamed(begun: Path, unmoved: Result, tmp_path: Path) -> None:
    there = Places.below(tmp_path / "old")
    shutil.copytree(begun, tmp_path / "old")
    as_noted_before(there, begun)
    there = renamed("run", "model", "data", "images")(there)
    there.train()
    assert result(there) == unmoved


def as_noted_before(there: Places, begun: Path) -> None:
    """Write what a run notes as it was until places were left out: paths, the SHA-256 of whole manifests, no name."""
    note = there.run / "packs.inputs.json"
    paths = {"--data": str(begun / "run/data"), "--output-dir": str(begun / "run/packs-by-size")}
    write_record(note, {**json.loads(note.read_text()), **paths})
    for packs in ("packs-by-size", "packs-held-out"):
        file = there.run / packs / "manifest.json"
        index = json.loads(file.read_text())
        (checksum,) = index["built_from"]["sizes"].values()
        index["built_from"]["sizes"] = {str(begun / "run/data/sizes.npz"): checksum}
        write_record(file, sealed(index))
    plan = there.run / "plan.inputs.json"
    packs = sha256_of(there.run / "packs-by-size/manifest.json")
    write_record(plan, {**json.loads(plan.read_text()), "packs": packs})
    file = there.run / f"checkpoints/iter_{BEGUN:07}/integrity.json"
    facts = json.loads(file.read_text())
    del facts["run"]["model"]
    facts["run"] |= {"data": sha256_of(there.run / "data/manifest.json"), "packs": packs}
    write_record(file, sealed(facts))


def test_another_models_weights_and_other_images_are_named(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, tmp_path / "other")
    there = Places.below(tmp_path / "other")
    config = json.loads((there.model / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = 1e-3
    (there.model / "config.json").write_text(json.dumps(config))
    assert "not what the run was trained on so far" in refusal(there.train(check=False))
    shutil.rmtree(there.model)
    shutil.copytree(begun / "model", there.model)
    for number, image in enumerate(sorted((there.images / "images").iterdir())):
        image.rename(image.with_name(f"{number}.kept"))
    assert "with other images" in refusal(replace(there, images=there.images / "images").train(check=False))
