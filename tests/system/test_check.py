"""Everything is checked before a rank starts: wrong commands are refused in a line, right ones get their weights."""

import contextlib
import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.vlm.preflight.__main__ import preflight
from omnibal_ext.architectures.presets import preset
from omnibal_ext.plan import Plan
from omnibal_ext.reading.document import sealed
from omnibal_ext.run_metrics import training_intervals
from tests.programs import tool
from tests.system.test_training import make_dataset, pack
from tests.unit.hf import models

TINY = preset("tiny")
BY_PLAN = {"pipeline_model_parallel_size": None}
"""Told by the plan alone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 48 conversations in iterations of four packs, and a model of Hugging Face's that fits it."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("check")
    make_dataset(folder, samples=48)
    pack(folder, micro_batches=4, output="packs")
    vision = {**models.INTERN_VIT, "num_attention_heads": 4, "image_size": [32, 32], "patch_size": [8, 8]}
    text = {**models.TEXT, "model_type": "llama", "vocab_size": 512, "tie_word_embeddings": False}
    config = transformers.InternVLConfig(vision_config=vision, text_config=text, image_token_id=7,
                                         tie_word_embeddings=False)  # fmt: skip
    torch.manual_seed(0)
    transformers.InternVLForConditionalGeneration(config).save_pretrained(folder / "theirs")
    shutil.copyfile(folder / "demo/tokenizer.model", folder / "theirs/tokenizer.model")
    plan = Plan.from_cuts(TINY.chain, (5,), num_microbatches=4, model="tiny", model_hash=TINY.hash)
    plan.save(folder / "two.json")
    record = plan.to_record()
    record["stages"][1]["layers"][0] += 1
    (folder / "lossy.json").write_text(json.dumps(sealed(record)))
    other = preset("internvl-chat-1.5")
    Plan.from_cuts(other.chain, (40,), model=other.name, model_hash=other.hash).save(folder / "other.json")
    shutil.copytree(folder / "data", folder / "other-data")
    manifest = json.loads((folder / "data/manifest.json").read_text())
    manifest["tiling"]["max_tiles"] += 1
    (folder / "other-data/manifest.json").write_text(json.dumps(sealed(manifest)))
    return folder


def findings(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int = 2, **changes: Any
) -> dict[str, tuple[str, str]]:
    """State and detail of every check of a run of two pipeline ranks; `changes` are flags, None leaves one out."""
    flags: dict[str, Any] = {
        "preset": "tiny", "plan": folder / "two.json", "data": folder / "data", "packs": folder / "packs", "lr": "1e-3",
        "from_scratch": True, "train_iters": 4, "global_batch_size": 4, "pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 1,
    }  # fmt: skip
    words = ["preflight"]
    for name, value in {**flags, **changes}.items():
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    monkeypatch.setattr(sys, "argv", words)
    for name, value in {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "RANK": 0, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    with contextlib.redirect_stdout(io.StringIO()):
        report = preflight({"endpoint": None, "memory_gib": None})
    json.dumps(report)
    return {finding["check"]: (finding["state"], finding["detail"]) for finding in report["findings"]}


def test_a_run_that_may_start_is_let_through(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = findings(folder, monkeypatch)
    assert {state for state, _ in found.values()} <= {"ok", "note"}
    assert {"devices", "model", "dataset", "packs", "weights", "plan", "checkpoints", "memory", "host memory"} <= set(
        found
    )


@pytest.mark.parametrize(
    ("check", "changes", "words"),
    [
        ("weights", {"from_scratch": False}, "no weights to start from"),
        ("dataset", {"preset": "llava-1.5-7b", "plan": None}, "--tile-size 32, not 336, --tokens-per-tile 4, not 576"),
        ("dataset", {"data": "nowhere"}, "no such folder; give a dataset that omnibal preprocess has made"),
        ("dataset", {"data": "demo"}, "is not a dataset: has no manifest.json; make one with omnibal preprocess"),
        ("packs", {"packs": "nowhere"}, "no such folder; give a packed index that omnibal pack has made"),
        ("packs", {"data": "other-data"}, "manifest.tiling.max_tiles is 32, not 33"),
        ("plan", {"plan": "other.json", **BY_PLAN}, "internvl-chat-1.5"),
        ("plan", {"plan": "lossy.json", **BY_PLAN}, "layer projector (id 5) is lost"),
        ("plan", {"freeze": "vit", **BY_PLAN}, "freeze"),
        ("flags", {"eval_data": "data"}, "without --eval-packs"),
        ("packs", {"global_batch_size": 3}, "packs; give --global-batch-size 4, or pack again with omnibal pack"),
        ("held-out packs", {"eval_data": "data", "eval_packs": "nowhere"}, "no such folder; give a packed index"),
        ("model", {"tensor_model_parallel_size": 3, "plan": None}, "3"),
    ],
)
def test_each_wrong_input_is_refused_by_the_check_that_is_about_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, check: str, changes: dict[str, Any], words: str
) -> None:
    files = ("data", "packs", "eval_data", "eval_packs", "plan")
    given = {name: folder / value if name in files and value else value for name, value in changes.items()}
    tensor, alone = given.get("tensor_model_parallel_size", 1), given.get("plan", "two.json") is None
    if alone:  # one rank, or one a tensor-parallel rank
        given["pipeline_model_parallel_size"] = 1
    found = findings(folder, monkeypatch, ranks=tensor if alone else 2, **given)
    state, detail = found.get(check) or found["flags"]
    assert state == "refused"
    assert words in detail
    assert "\n" not in detail


def launch(folder: Path, run: str, *flags: object, megatron: tuple[object, ...] = (), code: int = 0) -> Any:
    """Run the launcher on one rank; its JSON."""
    files = ("--data", folder / "data", "--packs", folder / "packs", "--run-dir", folder / run, "--analytic", "a100")
    words = ("--lr", "1e-3", "--train-iters", 2, "--log-interval", 1, *megatron)
    done = tool("launch.py", *files, *flags, "--", *words, check=False)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def test_the_check_is_one_screen_or_one_object_and_two_when_it_refuses(folder: Path) -> None:
    done = launch(folder, "none", "--preset", "tiny", "--check", code=2)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no weights to start from")
    assert len(done.stdout.splitlines()) < 40
    done = launch(folder, "none", "--model", folder / "theirs", "--check", "--json")
    found = {one["check"]: one for one in json.loads(done.stdout)["check"]}
    assert "to be converted" in found["weights"]["detail"]
    assert f"tokenizer compared with {folder / 'theirs'}" in found["dataset"]["detail"]
    assert not (folder / "none").exists()  # nothing is written


def start(folder: Path, *words: object, code: int) -> tuple[dict[str, dict[str, str]], str]:
    """Findings, by name, and what is said on stderr of a run of conversations that has made nothing yet."""
    files = ("--model", folder / "theirs", "--input", folder / "demo/train.jsonl", "--run-dir", folder / "first")
    usual = ("--chat-template", "internlm2-chat", "--analytic", "a100", "--json")
    done = tool("launch.py", *files, *usual, *words, check=False)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    assert not (folder / "first/data").exists()
    found = json.loads(done.stdout)["check"] if done.stdout.strip() else []
    return {one["check"]: one for one in found}, done.stderr


@pytest.mark.parametrize(
    ("words", "check", "said"),
    [
        (("--", "--learning-rate", "1e-5"), "flags", "--learning-rate: no such flag; here it is --lr"),
        (("--lr-warmup-init", "1e-6", "--", "--lr-warmup-init", "1"), None, "--lr-warmup-init: no such flag"),
        (("--lora-rank", 5000), "flags", "--lora-rank 5000: .* give at most that"),
        (("--nproc-per-node", 3, "--tensor-model-parallel-size", 3), "model", "do not divide by"),
        (("--save", "demo/train.jsonl", "--save-interval", 2), "checkpoints", "is a file"),
        (("--from", "demo"), "weights", "neither a checkpoint"),
    ],
)
def test_what_is_wrong_is_said_before_conversations_are_read(
    folder: Path, words: tuple[object, ...], check: str | None, said: str
) -> None:
    found, errors = start(folder, *(folder / word if str(word).startswith("demo") else word for word in words), code=2)
    assert re.search(rf"^error: .*{said}", errors)
    assert check is None or found[check]["state"] == "refused"


def test_a_check_before_packs_looks_at_all_else_and_names_what_it_did_not(folder: Path) -> None:
    found, _ = start(folder, "--check", "--held-out", 0.1, code=0)
    later = {name for name, one in found.items() if one["state"] == "later"}
    assert later == {"dataset", "packs", "held-out dataset", "held-out packs"}
    assert "not made yet; --dry-run makes them" in found["packs"]["detail"]
    looked = {"versions", "devices", "model", "weights", "checkpoints", "memory", "host memory", "conversations"}
    assert {found[name]["state"] for name in looked} <= {"ok", "note"}
    assert found["conversations"]["detail"] == "1 file of 48 lines; of the first 32 0 rejected"


def test_a_check_before_packs_reads_the_first_conversations(folder: Path, tmp_path: Path) -> None:
    """Of a corpus whose images lie elsewhere, the flag that says where is named."""
    shutil.copy(folder / "demo/train.jsonl", tmp_path)
    found, errors = start(folder, "--check", "--input", tmp_path / "train.jsonl", code=2)
    assert found["conversations"]["state"] == "refused"
    assert re.search(r"^error: \d+ of 32 lines rejected.* missing_image; .*--image-root", errors)


def losses(folder: Path, run: str) -> list[float]:
    return [line["loss"] for line in training_intervals(folder / run / "metrics.jsonl")]


def test_weights_arrive_and_the_same_command_goes_on_from_its_own_checkpoint(folder: Path) -> None:
    """Two runs from one folder begin alike, unlike random weights; stopped and started again, one ends as the other
    does in one go, and its metrics go on."""
    theirs = ("--model", folder / "theirs")
    saved = ("--save", folder / "run/checkpoints", "--save-interval", 2, "--train-iters", 4)
    launch(folder, "run", *theirs, megatron=(*saved, "--exit-interval", 2))
    first = losses(folder, "run")
    assert len(first) == 2
    done = launch(folder, "run", *theirs, "--progress", megatron=saved)
    assert "iteration 4/4" in done.stderr
    assert losses(folder, "run")[:2] == first
    launch(folder, "whole", *theirs, megatron=(*saved[2:], "--save", folder / "whole/checkpoints"))
    assert losses(folder, "run") == losses(folder, "whole")
    launch(folder, "random", "--preset", folder / "theirs", "--from-scratch")
    assert losses(folder, "random")[0] != pytest.approx(first[0], rel=1e-4)
    assert (folder / "run/train.log").exists()
