"""A new user's path: a model's folder and a file of conversations in, one command trains, one brings weights back."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.run_metrics import evaluations
from omnibal_ext.sizes import Sizes
from tests.long import short
from tests.programs import ROOT, refusal, tool
from tests.system.families import FAMILIES, PACKED, WITH_KERNELS, build

transformers = pytest.importorskip("transformers")
LAUNCH = ("--nproc-per-node", 2, "--analytic", "a100")
LIMITS = ("--max-pixels", 256, "--max-tokens", 300, "--shorten", "truncate", "--vit-budget", 96, "--llm-budget", 400)
LIMITED = {
    "qwen3-vl": (*LIMITS, "--held-out", 0.1, "--micro-batches", 2, "--save-hf"),
    "paligemma-2": ("--max-rejects", 48),
}
"""Families of which the command is given limits, a share to evaluate on, and asked for weights at every save; or which
take no text alone and no several turns."""
WAYS = {"llava-1.5": "tensor", "qwen3-vl-moe": "expert"}
"""How two ranks train a family, the others as a pipeline."""


ONE_A_KIND = ("llava-1.5", "qwen3-vl", "qwen3-vl-moe")
"""One square an image, images at their own size and videos, experts; tiles are those of the commands of the documents
(test_document_commands.py), videos with an encoder of their own those of test_beside_films.py. Other kinds of language
layers change nothing between a folder and Megatron but what `tests/unit/hf/test_parity.py` compares."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    tool("make_demo_data.py", "--output-dir", folder, "--samples", 48, "--heldout-samples", 4)
    return folder


@dataclass(frozen=True)
class Trained:
    folder: Path
    words: tuple[object, ...]
    """Of the command."""
    films: int
    """Files of conversations about videos, for the families that see them."""
    sounds: int
    """The same about sounds."""
    said: str


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("trained")
    build(request.param, demo, folder)
    films, sounds = sorted(folder.glob("films.jsonl")), sorted(folder.glob("sounds.jsonl"))
    inputs = ("--input", folder / "demo/train.jsonl", *films, *sounds)
    way = WAYS.get(request.param, "pipeline")
    words = ("--model", folder / "model", *inputs, "--run-dir", folder / "run", *LAUNCH)
    words = (*words, *LIMITED.get(request.param, ()), f"--{way}-model-parallel-size", 2)
    words = (*words, "--", "--save-interval", 2, "--log-interval", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI", "1")  # transformers then hands its warnings on, which Megatron would print to stdout
        yield Trained(folder, words, len(films), len(sounds), tool("launch.py", *words).stdout)


@pytest.mark.parametrize("trained", short(FAMILIES, ONE_A_KIND), indirect=True)
def test_one_command_trains_and_its_weights_are_transformers_own(trained: Trained) -> None:
    folder = trained.folder
    metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert len(metrics) > 1
    assert "conversations ->" in trained.said
    (difference,) = re.findall(r"logits differ from transformers' by (\S+)", trained.said)
    assert float(difference) < 1e-4
    manifest = json.loads((folder / "run/data/manifest.json").read_text())
    assert [source["samples"] for source in manifest["sources"][1:]] == [2] * (trained.films + trained.sounds)
    assert manifest["video_files"] == trained.films
    held_out = round(0.1 * manifest["samples"]) if "--held-out" in trained.words else 0
    lines = [line for line in metrics if "loss" in line]
    assert sum(line["samples"] for line in lines) == manifest["samples"] - held_out, "one epoch, to the sample"
    evaluated = evaluations(folder / "run/metrics.jsonl").values()
    assert [line["samples"] for line in evaluated] == [held_out] * (len(lines) if held_out else 0)
    if held_out:
        sizes = Sizes.load(folder / "run/data/sizes.npz")
        assert manifest["tiling"]["max_tiles"] == 256 // 8**2
        assert sizes.tokens.max() <= 300
        packs = PackedIndex.open(folder / "run/packs-by-size")
        assert (packs.vit_budget, packs.llm_budget) == (96, 400)
    words = ("--to-hf", folder / "run/checkpoints", "--output-dir", folder / "back", "--check", "--json")
    back = tool("convert_checkpoint.py", *words)
    assert json.loads(back.stdout)["logit_difference"] < 1e-4
    saves = {save.name: save for save in (folder / "run/checkpoints").glob("iter_*[0-9]")}
    exports = {f"{name}-hf" for name in saves} if "--save-hf" in trained.words else set()
    assert {path.name for path in (folder / "run/checkpoints").glob(".*-hf.*")} == set(), "all were waited for"
    assert {path.name for path in (folder / "run/checkpoints").glob("iter_*-hf")} == exports
    if exports:
        files = {path.name: path.read_bytes() for path in (folder / "back").iterdir()}
        last = folder / f"run/checkpoints/{max(exports)}"
        assert {path.name: path.read_bytes() for path in last.iterdir()} == files
    _, report = transformers.AutoModelForImageTextToText.from_pretrained(folder / "back", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


@pytest.mark.parametrize(
    "trained", short([one for one in PACKED if one not in WITH_KERNELS], ["qwen3-vl"]), indirect=True
)
def test_the_readmes_loop_runs_as_printed_on_its_packs(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family's; the names are those of the README's own command."""
    readme = (ROOT / "README.md").read_text()
    *_, command, loop = re.findall(r"```(?:bash\nomnibal launch|python\n)(.*?)```", readme, re.DOTALL)
    (folder,) = re.findall(r'from_pretrained\("(.*)"\)', loop)
    assert f"--model {folder} " in command
    assert "--run-dir run " in command
    (trained.folder / folder).symlink_to(trained.folder / "model")
    monkeypatch.chdir(trained.folder)
    names: dict[str, Any] = {}
    exec(loop, names)
    assert 0 < float(names["loss"].detach()) < 10
    assert len(names["sampler"]) >= 2


@pytest.mark.parametrize("trained", ["qwen3-vl"], indirect=True)
def test_the_same_command_again_makes_nothing_twice(trained: Trained) -> None:
    made = [trained.folder / path for path in ("run/data/tokens.bin", "run/packs-by-size/manifest.json")]
    stamps = [path.stat().st_mtime_ns for path in made]
    again = tool("launch.py", *trained.words).stdout
    assert "there, made from the same" in again
    assert "nothing is left to train" in " ".join(again.split())
    assert stamps == [path.stat().st_mtime_ns for path in made]


@pytest.fixture(scope="module")
def folder(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    build("internvl3.5", demo, folder)
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--input", "chat.jsonl", "--data", "data"), "--input makes dataset and packs in the run's folder"),
        (("--input", "nowhere.jsonl"), "nowhere.jsonl: no such file or folder"),
    ],
)
def test_what_is_not_named_or_twice_is_refused_in_a_line(folder: Path, flags: tuple[str, ...], message: str) -> None:
    words = ("--model", folder / "model", "--run-dir", folder / "refused", *flags)
    assert message in refusal(tool("launch.py", *words, check=False))
