"""Exports of saves to Hugging Face: one at a time, waited for, and one that fails ends nothing."""

from pathlib import Path

import pytest

from megatron.vlm.hf import export
from omnibal_ext.errors import UserError


def program(folder: Path, lines: str) -> str:
    path = folder / "python"
    path.write_text(f'#!/bin/sh\necho "begins $5" >> {folder}/log\n{lines}\necho "ends $5" >> {folder}/log\n')
    path.chmod(0o755)
    return str(path)


def test_exports_follow_each_other_and_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export.sys, "executable", program(tmp_path, "sleep 0.3"))
    exports = export.SaveExporter(tmp_path)
    exports.wait()
    for number in (1, 2):
        exports.export(tmp_path / f"iter_{number}")
    assert not (tmp_path / "log").read_text().endswith(f"ends {tmp_path}/iter_2\n"), "training goes on meanwhile"
    exports.wait()
    wanted = [f"{what} {tmp_path}/iter_{number}" for number in (1, 2) for what in ("begins", "ends")]
    assert (tmp_path / "log").read_text().splitlines() == wanted


@pytest.mark.parametrize(
    ("lines", "why"),
    [("echo a >&2; echo error: no space left >&2; echo b >&2; exit 2", "no space left"), ("exit 7", "exit code 7")],
)
def test_an_export_that_fails_is_said_and_ends_no_run(
    lines: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export.sys, "executable", program(tmp_path, lines))
    exports = export.SaveExporter(tmp_path)
    exports.export(tmp_path / "iter_0000002")
    exports.wait()
    said = f"warning: {tmp_path}/iter_0000002-hf: not written ({why}); training goes on without it\n"
    assert capsys.readouterr().out == said
    exports.wait()
    assert capsys.readouterr().out == ""


def test_a_folder_that_does_not_say_what_theirs_looks_like_is_refused(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with pytest.raises(UserError, match="--save-hf: nothing says what Hugging Face's model looks like"):
            export.check_like(folder)
    (tmp_path / "weights.json").touch()
    assert export.check_like(tmp_path) == tmp_path
