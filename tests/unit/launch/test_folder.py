"""A run's folder loses nothing: what another run left is numbered, what is written is followed line by line."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from omnibal_ext import console
from omnibal_ext.console import follow_metrics
from omnibal_ext.errors import UserError
from omnibal_ext.launch import versions
from omnibal_ext.launch.folder import make_way, put_aside
from omnibal_ext.launch.weights import converted_folder

ROOT = Path(__file__).parents[3]


def test_what_another_run_left_is_numbered_and_kept(tmp_path: Path) -> None:
    assert put_aside(tmp_path) == []
    for number in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(f"run {number}")
        (tmp_path / "tensorboard").mkdir()
        if number == 2:
            (tmp_path / "train.log").write_text("log 2")
        put_aside(tmp_path)
    left = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    assert left == {"metrics.1.jsonl": "run 1", "metrics.2.jsonl": "run 2", "train.2.log": "log 2"}
    assert (tmp_path / "tensorboard.1").is_dir()
    assert (tmp_path / "tensorboard.2").is_dir()


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


def test_where_there_is_no_terminal_progress_is_a_line_a_minute_and_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.jsonl"
    follow(path, monkeypatch, [line(number) for number in range(1, 6)])
    told = capsys.readouterr().err.splitlines()
    assert [text.split(":")[0].strip() for text in told] == ["iteration 2/9", "iteration 4/9", "iteration 5/9"]
    assert "loss 1.000, 2 samples/s" in told[0]


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
    assert "megatron-core 0.19" in versions.check_versions()
    text = (ROOT / "setup.py").read_text()
    for package, wanted in versions.SUPPORTED.items():
        assert f"{package}{wanted}" in text
    assert f'python_requires="{versions.PYTHON}"' in text
    monkeypatch.setattr(versions, "version", lambda _: "0.18.0")
    with pytest.raises(UserError, match=r"torch is 0\.18\.0; >=2.8,<3 is needed"):
        versions.check_versions()


def test_a_conversion_is_used_again_until_its_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By every run: it is kept beside its source, or in the run's folder where nothing may be written."""
    source = tmp_path / "model"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_text("{}")
    first = converted_folder(source, Path("run"))
    assert first.parent == tmp_path
    assert first == converted_folder(source, Path("other"))
    (source / "model.safetensors").write_text("{} ")
    changed = converted_folder(source, Path("run"))
    assert changed != first
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert converted_folder(source, Path("run")) == Path("run") / changed.name


def test_packs_make_way_unless_a_run_was_started_on_them(tmp_path: Path) -> None:
    """It could not go on without them."""
    packs = tmp_path / "packs"
    packs.mkdir()
    (packs / "thesis.tex").touch()
    make_way(tmp_path, packs)
    assert (packs / "thesis.tex").exists()
    (packs / "pack_offsets.npy").touch()
    (tmp_path / "inputs.json").touch()
    make_way(tmp_path, packs)
    assert (packs / "pack_offsets.npy").exists()
    (tmp_path / "inputs.json").unlink()
    make_way(tmp_path, packs)
    assert not packs.exists()
    make_way(tmp_path, packs)
