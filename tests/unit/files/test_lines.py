"""What a run appends to its files: a disk without room takes nothing else along."""

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron.vlm.monitoring.journal import survive_write_errors
from omnibal_ext.errors import UserError
from omnibal_ext.files.records import JsonLines, write_record
from omnibal_ext.run_metrics import complete_lines


@contextmanager
def room(size: int) -> Iterator[None]:
    """No file may be larger: writing on then fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def iterations(path: Path) -> list[int]:
    return [line["iteration"] for line in complete_lines(path)[0]]


def test_a_full_disk_loses_lines_and_keeps_whole_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run/metrics.jsonl"
    lines = JsonLines(path)
    lines.append({"iteration": 1})
    with room(path.stat().st_size + 7):
        for number in (2, 3):
            lines.append({"iteration": number})
        assert path.read_bytes().endswith(b"\n")
    lines.append({"iteration": 4})
    assert iterations(path) == [1, 4]
    (warning,) = capsys.readouterr().out.splitlines()
    assert warning == f"warning: {path}: cannot be written (File too large); training goes on without it"
    with room(path.stat().st_size):
        lines.append({"iteration": 5})
    assert len(capsys.readouterr().out.splitlines()) == 1  # it had been well in between


@pytest.mark.parametrize("length", [3, 2**16 - 1, 2**16, 200_000])
def test_half_a_line_of_before_is_taken_out(tmp_path: Path, length: int) -> None:
    path = tmp_path / "metrics.jsonl"
    for whole in ('{"iteration": 1}\n', ""):
        path.write_text(whole + "x" * length)
        JsonLines(path).append({"iteration": 2})
        assert path.read_text() == whole + '{"iteration": 2}\n'


def test_a_place_that_cannot_be_written_to_is_no_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    JsonLines(tmp_path / "file/metrics.jsonl").append({})
    JsonLines(tmp_path).append({})
    assert capsys.readouterr().out.count("warning: ") == 2


def test_curves_end_at_a_full_disk_and_training_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_writer = pytest.importorskip("tensorboard.summary.writer.record_writer").RecordWriter
    for name in ("write", "flush", "close"):
        monkeypatch.setattr(record_writer, name, getattr(record_writer, name))  # and put back
    from torch.utils.tensorboard import SummaryWriter

    raised: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    survive_write_errors()
    with room(3000):
        writer = SummaryWriter(str(tmp_path), max_queue=1)
        for number in range(300):
            writer.add_scalar("loss", 1.0, number)
            writer.flush()
        writer.close()
    assert not raised
    assert capsys.readouterr().out.count("TensorBoard's curves cannot be written (File too large)") == 1
    assert 0 < next(tmp_path.iterdir()).stat().st_size <= 3000


def test_a_record_that_cannot_be_written_is_a_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "inputs.json").mkdir()
    with pytest.raises(UserError, match=r"inputs.json: Is a directory; choose another path, or fix what is there"):
        write_record(tmp_path / "inputs.json", {})
    with room(10), pytest.raises(UserError, match=r"plan.json: File too large; make room and start again"):
        write_record(tmp_path / "plan.json", {"a": "b" * 100})
    (tmp_path / "inputs.json/x").touch()
    with pytest.raises(UserError, match=r"inputs.json/x: (Not a directory|File exists)"):
        write_record(tmp_path / "inputs.json/x/y", {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inputs.json"]
