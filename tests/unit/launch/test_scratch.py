"""Temporary files of ranks do not outlive their run, nor longer than the next start if it was killed."""

import multiprocessing
import os
import socket
import tempfile
import time
from pathlib import Path

import pytest

from omnibal_ext.launch import scratch as rooms
from omnibal_ext.launch.scratch import scratch


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(rooms, "LONGEST", len(str(tmp_path)))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    return tmp_path


def run_until_killed(seen: Path) -> None:
    with scratch() as variables:
        (Path(variables["TMPDIR"]) / "torchelastic_x").mkdir()
        seen.write_text(variables["TMPDIR"])
        time.sleep(60)


def test_a_run_leaves_nothing_and_compiled_code_stays(base: Path) -> None:
    with scratch() as variables:
        folder = Path(variables["TMPDIR"])
        assert folder.parent == base
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "pymp-x").mkdir()
    assert list(base.iterdir()) == []
    assert Path(variables["TORCHINDUCTOR_CACHE_DIR"]).parent == base


def test_the_next_start_removes_what_a_killed_run_has_left_and_nothing_else(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = base / "seen"
    killed = multiprocessing.get_context("fork").Process(target=run_until_killed, args=(seen,))
    killed.start()
    while not (seen.exists() and seen.read_text()):
        time.sleep(0.01)
    left, mine, linked = Path(seen.read_text()), base / "omnibal-ranks-abcdefgh", base / "omnibal-ranks-ijklmnop"
    mine.write_text("kept")
    linked.symlink_to(base / "omnibal-ranks-of-others")
    (base / "omnibal-ranks-of-others").mkdir()
    with scratch():
        assert left.is_dir()  # of a run that goes on
    killed.kill()
    killed.join()
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
        with scratch():
            assert left.is_dir()  # of another user
    with scratch() as variables:
        assert not left.exists()
        assert {*base.iterdir()} == {seen, mine, linked, base / "omnibal-ranks-of-others", Path(variables["TMPDIR"])}


def test_where_sockets_would_have_no_room_ranks_use_the_machine_s_folder(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest name that Python makes there can be bound at the limit, and not beyond the kernel's."""
    monkeypatch.setattr(rooms, "LONGEST", len(str(base)) - 1)
    with scratch() as variables:
        assert variables == {}
    monkeypatch.undo()
    name = "/" + "x" * (rooms.LONGEST - 1) + "/omnibal-ranks-12345678/pymp-12345678/listener-12345678"
    with socket.socket(socket.AF_UNIX) as one, pytest.raises(FileNotFoundError):  # there is no such folder
        one.bind(name)
