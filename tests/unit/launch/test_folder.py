"""A run's folder loses nothing: what another run left is numbered, what is written is followed line by line."""

import json
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from omnibal_ext import console, errors
from omnibal_ext.console import follow_metrics
from omnibal_ext.errors import UserError
from omnibal_ext.launch import check
from omnibal_ext.launch.folder import number_old_files, refuse_other, refuse_used, remove_unused
from omnibal_ext.launch.weights import converted_folder
from tests.programs import ROOT


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log", "tensorboard", "timeline.jsonl"])
def test_whatever_a_run_writes_is_put_aside_and_refused_to_a_fresh_one(name: str, tmp_path: Path) -> None:
    """Each alone, and beside what other runs left of it."""
    (tmp_path / "plan.json").touch()
    refuse_used(tmp_path)
    stem, dot, ending = name.partition(".")
    for number in (1, 2):
        (tmp_path / name).write_text(f"run {number}")
        with pytest.raises(UserError, match=f"has {name} of an earlier run"):
            refuse_used(tmp_path)
        assert number_old_files(tmp_path) == [tmp_path / f"{stem}.{number}{dot}{ending}"]
        assert not (tmp_path / name).exists()
    assert [(tmp_path / f"{stem}.{n}{dot}{ending}").read_text() for n in (1, 2)] == ["run 1", "run 2"]
    refuse_used(tmp_path)
    assert (tmp_path / "plan.json").exists()


def line(iteration: int, **more: Any) -> str:
    return json.dumps({"iteration": iteration, "iterations": 9, "loss": 1.0, "samples_per_second": 2.0, **more}) + "\n"


def follow(path: Path, monkeypatch: pytest.MonkeyPatch, texts: list[str], start: int = 0) -> None:
    """Follow a file that grows by one text every 30 seconds, until all are written."""
    clock, waiting = [0.0], list(texts)

    def running() -> bool:
        if waiting:
            with path.open("a") as file:
                file.write(waiting.pop(0))
            clock[0] += 30
        return bool(waiting)

    monkeypatch.setattr(console.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(console.time, "sleep", lambda _: None)
    follow_metrics(path, running, start)


@pytest.mark.parametrize(("lines", "said"), [(0, []), (1, [1]), (2, [2]), (3, [2, 3]), (4, [2, 4]), (7, [2, 4, 6, 7])])
def test_the_last_iteration_is_said_once_however_long_the_run_was(
    lines: int, said: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line takes half a minute: runs of less than one, of whole ones and between."""
    follow(tmp_path / "metrics.jsonl", monkeypatch, [line(number) for number in range(1, lines + 1)])
    told = capsys.readouterr().err.splitlines()
    assert [text.split(":")[0].strip() for text in told] == [f"iteration {number}/9" for number in said]
    assert all("loss 1.000, 2 samples/s" in text for text in told)


def test_progress_starts_behind_the_earlier_run_and_waits_for_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(8))
    half = line(4)
    evaluation = json.dumps({"iteration": 5, "evaluation": {"loss": 3.0}}) + "\n"
    follow(path, monkeypatch, ["", "", half[:20], half[20:] + evaluation], start=path.stat().st_size)
    (told,) = capsys.readouterr().err.splitlines()
    assert "iteration 4/9" in told


def test_versions_are_those_that_are_installed_with_us(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "megatron-core 0.19" in check.check_versions()
    text = (ROOT / "setup.py").read_text()
    for package, wanted in check.SUPPORTED.items():
        assert f"{package}{wanted}" in text
    assert f'python_requires="{check.PYTHON}"' in text
    monkeypatch.setattr(check, "version", lambda _: "0.18.0")
    with pytest.raises(UserError, match=r"torch is 0\.18\.0; >=2.8,<3 is needed"):
        check.check_versions()

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(check, "version", missing)
    monkeypatch.setattr(errors, "find_spec", lambda _: None)
    with pytest.raises(
        UserError, match=r"torch, which is not installed: pip install '\.\[train\]' in a clone of this project, or run"
    ):
        check.check_versions()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    source = tmp_path / "model"
    source.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (source / name).write_text("{}")
        os.utime(source / name, (1_700_000_000,) * 2)
    return source


def replaced(name: str, text: str, nanoseconds: int) -> Callable[[Path], object]:
    def change(source: Path) -> None:
        times = (source / name).stat()
        (source / name).write_text(text)
        os.utime(source / name, ns=(times.st_atime_ns, times.st_mtime_ns + nanoseconds))

    return change


CHANGES: dict[str, Callable[[Path], object]] = {
    "weights of the same size": replaced("model.safetensors", "[]", 1_000_000_000),
    "weights of the same second": replaced("model.safetensors", "[]", 1_000),
    "weights that are older": replaced("model.safetensors", "[]", -1_000_000_000),
    "weights of the same time": replaced("model.safetensors", "{} ", 0),
    "tokenizer": replaced("tokenizer.json", "[]", 1_000),
    "contents of the configuration": replaced("config.json", "[]", 0),
    "a file more": lambda source: (source / "model-2.safetensors").write_text("{}"),
    "a file less": lambda source: (source / "tokenizer.json").unlink(),
    "a name": lambda source: (source / "tokenizer.json").rename(source / "words.json"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_conversion_is_used_again_until_its_source_changes(
    change: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = converted_folder(model, Path("run"))
    assert first.parent == model.parent
    assert first == converted_folder(model, Path("other"))
    with monkeypatch.context() as patch:  # in the run's folder where it must
        patch.setattr(os, "access", lambda *_: False)
        assert converted_folder(model, Path("run")) == Path("run") / first.name
    CHANGES[change](model)
    assert converted_folder(model, Path("run")) != first


def test_packs_make_way_unless_a_run_was_started_on_them(tmp_path: Path) -> None:
    packs = tmp_path / "packs"
    packs.mkdir()
    (packs / "thesis.tex").touch()
    remove_unused(tmp_path, packs)
    assert (packs / "thesis.tex").exists()
    (packs / "manifest.json").touch()
    (tmp_path / "inputs.json").touch()
    remove_unused(tmp_path, packs)
    assert (packs / "manifest.json").exists()
    (tmp_path / "inputs.json").unlink()
    remove_unused(tmp_path, packs)
    assert not packs.exists()
    remove_unused(tmp_path, packs)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"--max-tokens": 9, "shorten": []}, ""),
        ({"--max-tokens": 9, "shorten": [], "--later": 1}, ""),  # noted by an older version, which had no such flag
        ({"--max-tokens": 9, "shorten": ()}, ""),
        ({"--max-tokens": 8, "shorten": []}, "--max-tokens is 9, not 8"),
        ({"--max-tokens": 9, "shorten": ["truncate"]}, "shorten is"),
    ],
)
def test_a_run_that_was_begun_on_other_data_is_named_at_once(tmp_path: Path, asked: dict[str, Any], said: str) -> None:
    note = tmp_path / "data.inputs.json"
    refuse_other(tmp_path, note, asked)
    note.write_text(json.dumps({"--max-tokens": 9, "shorten": []}))
    refuse_other(tmp_path, note, {})  # no run was begun
    (tmp_path / "inputs.json").touch()
    if not said:
        refuse_other(tmp_path, note, asked)
        return
    with pytest.raises(UserError, match=rf"a run was begun there on other data \({said}.*choose another --run-dir"):
        refuse_other(tmp_path, note, asked)
    note.write_text("{")
    refuse_other(tmp_path, note, asked)
