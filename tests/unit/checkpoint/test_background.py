"""What is written while training goes on is what was saved; who writes it does not outlive its rank."""

import multiprocessing
import os
import signal
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from megatron.vlm.checkpoint import background, guard
from tests.waiting import until


def test_training_does_not_change_what_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.arange(3.0)

    def prepare(writer: SimpleNamespace) -> None:
        writer.write_buckets = [("path", "key", ([("item", b"bytes")], [("item", weight)]))]

    writer = SimpleNamespace()
    monkeypatch.setattr(background, "_PREPARE", prepare)
    background._prepare_copies(writer)
    weight.add_(1)
    ((path, key, (content, ((item, kept),))),) = writer.write_buckets
    assert (path, key, content, item) == ("path", "key", [("item", b"bytes")], "item")
    assert kept.tolist() == [0, 1, 2]


def waits(file: Path) -> None:
    background._LOOP = lambda *_: time.sleep(60)
    file.write_text(str(os.getpid()))
    background.write()


def starts_a_writer(file: Path) -> None:
    multiprocessing.get_context("fork").Process(target=waits, args=(file,)).start()
    time.sleep(60)


def runs(pid: int) -> bool:
    """Whether a process is there, and has not ended: who inherits it may take a while to ask how."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_writer_ends_with_its_rank(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    rank = multiprocessing.get_context("fork").Process(target=starts_a_writer, args=(file,))
    rank.start()
    until(lambda: file.exists() and file.read_text(), "the writer's number")
    os.kill(rank.pid, signal.SIGKILL)
    rank.join()
    until(lambda: not runs(int(file.read_text())), "the writer's end")


def test_what_is_being_written_is_finished_before_room_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is no save yet, and what is none is cleared away."""
    calls: list[str] = []
    monkeypatch.setattr(guard, "maybe_finalize_async_save", lambda blocking, _: calls.append(f"finish {blocking}"))
    monkeypatch.setattr(guard.training, "save_checkpoint", lambda *_: calls.append("save"))
    monkeypatch.setattr(guard, "on_all_ranks", lambda _: None)
    monkeypatch.setattr(guard, "on_first_rank", lambda _: calls.append("room"))
    monkeypatch.setattr(guard, "get_args", lambda: Namespace(save=str(tmp_path)))
    guard.Saving(dict, None, True, None).save(4)
    assert calls == ["finish True", "room", "save"]
