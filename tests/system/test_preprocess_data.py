"""The preprocessing tool as users run it: counts add up, bad lines are named, results do not depend on the workers."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.programs import ROOT, environment, refusal, run_tool, tool, warm_interpreter

SAMPLES = 40


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    done = tool("make_demo_data.py", "--output-dir", folder, "--samples", SAMPLES, "--heldout-samples", 5, "--json")
    assert json.loads(done.stdout)["samples"] == SAMPLES
    return folder


def preprocess_flags(raw: Path, output: Path, **changed: object) -> list[object]:
    flags: dict[str, object] = {
        "input": raw / "train.jsonl", "image_root": raw, "tokenizer_model": raw / "tokenizer.model",
        "chat_template": "internlm2-chat", "output_dir": output, "tile_size": 32, "tokens_per_tile": 4, "max_tiles": 32,
        **changed,
    }  # fmt: skip
    return [item for name, value in flags.items() for item in ("--" + name.replace("_", "-"), value)]


def preprocess(raw: Path, output: Path, **changed: object) -> dict[str, Any]:
    done = tool("preprocess_data.py", *preprocess_flags(raw, output, **changed), "--json")
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def bad_lines(raw: Path) -> dict[str, str]:
    """Reason -> a line that deserves it."""
    (raw / "images" / "cut.png").write_bytes((raw / "images" / "train-00001-0.png").read_bytes()[:150])

    def about(image: object, question: str = "<image>\nRead the digits.", answer: str = "a5") -> str:
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        return json.dumps({"image": image, "conversations": turns})

    return {
        "missing_image": about("images/nowhere.png"),
        "truncated_image": about("images/cut.png"),
        "malformed_line": '{"conversations": [',
        "image_mark_mismatch": about("images/train-00001-0.png", question="<image><image>Read the digits."),
        "empty_conversation": json.dumps({"conversations": []}),
        "path_outside_root": about("../secret.png"),
        "too_many_tokens": about(None, question="Repeat", answer="a5" * 300),
    }


def test_every_line_is_either_a_sample_or_a_named_reject(raw: Path, tmp_path: Path) -> None:
    bad = bad_lines(raw)
    good = (raw / "train.jsonl").read_text().splitlines()
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text("\n".join([*good[:20], *bad.values(), *good[20:]]) + "\n\n")
    summary = preprocess(raw, tmp_path / "dataset", input=mixed, max_tokens=300)
    assert (summary["samples"], summary["rejected"]) == (SAMPLES, len(bad))
    rejected = [json.loads(line) for line in (tmp_path / "dataset" / "rejected.jsonl").read_text().splitlines()]
    assert [(row["line"], row["reason"]) for row in rejected] == list(enumerate(bad, start=21))
    assert {row["file"] for row in rejected} == {str(mixed)}
    assert summary["rejected_by_reason"] == dict.fromkeys(sorted(bad), 1)


def test_a_model_decides_what_no_flag_says(raw: Path, tmp_path: Path) -> None:
    flags = ["--input", raw / "train.jsonl", "--image-root", raw, "--tokenizer-model", raw / "tokenizer.model"]
    flags += ["--chat-template", "internlm2-chat", "--max-tiles", 32, "--json", "--output-dir"]
    for name, model in (("by_model", ["--model", "tiny"]), ("by_flags", ["--tile-size", 32, "--tokens-per-tile", 4])):
        tool("preprocess_data.py", *flags, tmp_path / name, *model)
    assert contents(tmp_path / "by_model") == contents(tmp_path / "by_flags")
    manifest = json.loads((tmp_path / "by_model" / "manifest.json").read_text())
    assert manifest["image_markup"] == "internvl"
    assert manifest["special_tokens"]["<IMG_CONTEXT>"] == manifest["image_token_id"]
    assert manifest["tokenizer"]["vocabulary"]["size"] <= manifest["vocab_size"]


@pytest.mark.parametrize(
    ("model", "flag", "value", "said"),
    [
        ("tiny", "tile_size", 448, "--tile-size 448, but model 'tiny' needs 32"),
        ("llava-1.5-7b", "tile_size", 32, "but model 'llava-1.5-7b' needs 336"),
        ("nowhere", "tile_size", 32, "nowhere: no such folder, and no preset"),
    ],
)
def test_flags_against_the_model_end_with_exit_code_2(
    raw: Path, tmp_path: Path, model: str, flag: str, value: object, said: str
) -> None:
    flags = preprocess_flags(raw, tmp_path / "dataset", model=model, **{flag: value})
    assert said in refusal(run_tool("preprocess_data.py", *flags))


def test_a_misnamed_field_does_not_end_with_exit_code_0(raw: Path, tmp_path: Path) -> None:
    (raw / "renamed.jsonl").write_text((raw / "train.jsonl").read_text().replace('"image":', '"image_file":'))
    flags = preprocess_flags(raw, tmp_path / "dataset", input=raw / "renamed.jsonl")
    line = refusal(run_tool("preprocess_data.py", *flags))
    assert "unsupported_field" in line
    assert "'image_file' is not read" in line
    again = run_tool("preprocess_data.py", *flags, "--max-rejects", SAMPLES, "--json")
    assert json.loads(again.stdout)["rejected_by_reason"]["unsupported_field"] > 10


def test_a_second_run_finds_the_work_done_and_another_recipe_is_refused(raw: Path, tmp_path: Path) -> None:
    first = preprocess(raw, tmp_path / "dataset")
    stamp = (tmp_path / "dataset" / "tokens.bin").stat().st_mtime_ns
    second = preprocess(raw, tmp_path / "dataset")
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert (tmp_path / "dataset" / "tokens.bin").stat().st_mtime_ns == stamp
    refused = run_tool("preprocess_data.py", *preprocess_flags(raw, tmp_path / "dataset", max_tiles=8))
    assert "output-dir" in refusal(refused)


def test_the_slurm_script_prepares_shards_and_then_joins_them(raw: Path, tmp_path: Path) -> None:
    script, output = ROOT / "scripts" / "slurm" / "preprocess.sbatch", tmp_path / "dataset"

    def sbatch(*extra: object, **task: str) -> subprocess.CompletedProcess[str]:
        found = environment(PYTHON=warm_interpreter(), SLURM_SUBMIT_DIR=str(ROOT), **task)
        command = ["bash", str(script), *map(str, [*extra, *preprocess_flags(raw, output), "--json"])]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=found, cwd=tmp_path)

    shard = sbatch(SLURM_ARRAY_TASK_ID="0", SLURM_ARRAY_TASK_COUNT="1")
    assert json.loads(shard.stdout)["shard"] == "0/1", shard.stderr
    assert not output.exists()
    merged = sbatch("--merge")
    assert json.loads(merged.stdout)["samples"] == SAMPLES, merged.stderr
    assert (output / "manifest.json").is_file()


@pytest.mark.parametrize(
    ("flag", "value"), [("tokenizer_model", "setup.py"), ("chat_template", "alpaca"), ("shard", "4/4")]
)
def test_wrong_input_ends_with_one_line_and_exit_code_2(raw: Path, tmp_path: Path, flag: str, value: str) -> None:
    result = run_tool("preprocess_data.py", *preprocess_flags(raw, tmp_path / "dataset", **{flag: value}))
    assert value in refusal(result)
    assert not (tmp_path / "dataset").exists()
