"""A run goes on from the newest save that is whole to the last byte, whatever happened to tracker and files."""

import json
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.vlm.checkpoint import attempts, guard, integrity
from megatron.vlm.checkpoint.folder import Checkpoints, Save
from omnibal_ext.errors import UserError
from omnibal_ext.reading.document import sealed

TRACKER = "latest_checkpointed_iteration.txt"
pytestmark = pytest.mark.usefixtures("one_rank")


def save(folder: Path, iteration: int) -> Path:
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    bits = np.random.default_rng(iteration)
    for name, size in ((".metadata", 300), ("metadata.json", 60), ("__0_0.distcp", 5000), ("__1_0.distcp", 7000)):
        (path / name).write_bytes(bits.bytes(size))
    integrity.seal_by_one_process(path, {"consumed_packs": iteration})
    (folder / TRACKER).write_text(str(iteration))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for iteration in (10, 20, 30):
        save(tmp_path, iteration)
    return tmp_path


def arguments(folder: Path, **changes: object) -> Namespace:
    values = {"load": str(folder), "pretrained_checkpoint": None, "trust": False, "ckpt_step": None, **changes}
    return Namespace(**values)


def believed(folder: Path) -> int:
    guard.select_save(arguments(folder))
    return int((folder / TRACKER).read_text())


@pytest.mark.parametrize(
    ("tracker", "iteration"),
    [("30", 30), ("20", 20), ("", 30), ("3\0", 30), ("31", 30), ("25", 20), ("5", 30), ("-1", 30), ("\xb2", 30),
     (None, 30)],
)  # fmt: skip
def test_the_tracker_decides_where_it_can_else_the_saves(folder: Path, tracker: str | None, iteration: int) -> None:
    (folder / TRACKER).unlink()
    if tracker is not None:
        (folder / TRACKER).write_text(tracker)
    assert Checkpoints(folder).exist
    assert (Checkpoints(folder).newest().iteration, believed(folder)) == (iteration, iteration)


def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(change(path.read_bytes()))


cut, grow = rewritten(lambda whole: whole[:-2]), rewritten(lambda whole: whole + b"\0")
flip = rewritten(lambda whole: bytes(byte ^ 4 * (2 * at // len(whole) == 1) for at, byte in enumerate(whole)))


@pytest.mark.parametrize("damage", [flip, cut, grow, Path.unlink])
@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json", "integrity.json"])
def test_a_damaged_save_is_passed_over_and_named(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None]
) -> None:
    damage(folder / "iter_0000030" / name)
    assert believed(folder) == 20
    said = capsys.readouterr().out
    assert f"iter_0000030/{name}: " in said
    assert "newest whole save, " in said
    damage(folder / "iter_0000020" / name)
    assert believed(folder) == 10
    damage(folder / "iter_0000010" / name)
    with pytest.raises(UserError, match=r"no save in it is whole: .*--trust"):
        believed(folder)


@pytest.mark.parametrize("damage", [cut, grow])
@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json"])
def test_sizes_alone_tell_of_a_file_that_is_another(folder: Path, name: str, damage: Callable[[Path], None]) -> None:
    whole = Save(folder / "iter_0000030", 30)
    whole.check()
    damage(whole.path / name)
    with pytest.raises(UserError, match=rf"{name}: has \d+ bytes of \d+"):
        whole.check()


@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "metadata.json", "integrity.json"])
def test_trust_passes_over_what_its_checksums_say_is_damaged(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, damage: Callable[[Path], None]
) -> None:
    """It is for saves of others, which have none: one whose checksums are gone may be such a one."""
    damage(folder / "iter_0000030" / name)
    guard.select_save(arguments(folder, trust=True))
    passed = (name, damage) != ("integrity.json", Path.unlink)
    assert (folder / TRACKER).read_text() == ("20" if passed else "30")
    assert (f"iter_0000030/{name}: " in capsys.readouterr().out) == passed


STRANGERS: dict[str, Callable[[Path], object]] = {
    "an empty file": lambda path: path.write_bytes(b""),
    "a copy": lambda path: path.write_bytes((path.parent / ".metadata").read_bytes()), "a folder": Path.mkdir,
    "a link": lambda path: path.symlink_to(path.parent / ".metadata"),
    "a link to nothing": lambda path: path.symlink_to("nowhere"), "a pipe": os.mkfifo,
}  # fmt: skip


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("name", ["common.pt", ".hidden", "__2_0.distcp", "two\nlines", "model_optim_rng.pt"])
def test_strangers_spoil_a_save(folder: Path, capsys: pytest.CaptureFixture[str], name: str, kind: str) -> None:
    """Core reads a common.pt before all else, and whatever else it may once read is not ours."""
    STRANGERS[kind](folder / "iter_0000030" / name)
    assert believed(folder) == 20
    (line, _) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        f"warning: {folder / 'iter_0000030'}: {name!r} is none of the files that integrity.json lists"
    )
    (folder / TRACKER).write_text("30")
    with pytest.raises(UserError, match="iter_0000020 is whole: name it in latest"):
        Checkpoints(folder).first_weights()
    assert Checkpoints(folder).newest().iteration == 20


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "integrity.json"])
@pytest.mark.parametrize("kind", ["a folder", "a link to nothing", "a pipe"])
def test_a_save_with_a_folder_link_or_pipe_for_a_file_is_passed_over(folder: Path, name: str, kind: str) -> None:
    path = folder / "iter_0000030" / name
    path.unlink()
    STRANGERS[kind](path)
    assert believed(folder) == 20


def test_an_integrity_file_that_makes_no_sense_is_not_believed(folder: Path) -> None:
    path = folder / "iter_0000030" / "integrity.json"
    whole = json.loads(path.read_text())
    for change in ({"sizes": {}}, {"files": {}}, {"files": None}, {"run": []},
                   {"sizes": dict.fromkeys(whole["sizes"], -1)},
                   {"files": {"../x": "0"}, "sizes": {"../x": 0}}):  # fmt: skip
        path.write_text(json.dumps(sealed({**whole, **change})))
        (folder / TRACKER).write_text("30")
        assert believed(folder) == 20
    with pytest.raises(UserError, match="iter_0000030/integrity"):
        Checkpoints(folder).newest(step=30)


@pytest.mark.parametrize(
    "run", [{"preset": ["tiny"]}, {"from": 3}, {"adapters": {"rank": "8"}}, {"optimizer": {"frozen": 1}}]
)
def test_what_a_save_says_of_its_run_has_the_types_of_it(folder: Path, run: dict[str, object]) -> None:
    path = folder / "iter_0000030/integrity.json"
    path.write_text(json.dumps(sealed({**json.loads(path.read_text()), "run": run})))
    assert believed(folder) == 20


def test_a_copy_of_a_save_under_another_name_is_not_loaded(folder: Path) -> None:
    newest = folder / "iter_0000030"
    shutil.copytree(newest, folder / "iter_30")
    shutil.copytree(newest, folder / "iter_40")
    assert [save.path.name for save in Checkpoints(folder).saves()] == [
        "iter_0000030", "iter_0000020", "iter_0000010"
    ]  # fmt: skip
    flip(newest / "__0_0.distcp")
    assert believed(folder) == 20
    shutil.rmtree(newest)
    shutil.copytree(folder / "iter_0000010", newest)  # whole, of another iteration
    (folder / TRACKER).write_text("30")
    assert believed(folder) == 20
    with pytest.raises(UserError, match="iter_0000030: is a copy of 'iter_0000010' under another name"):
        Save(newest, 30).check()


def test_a_save_of_before_saves_knew_their_names_is_whole(folder: Path) -> None:
    path = folder / "iter_0000030" / "integrity.json"
    path.write_text(json.dumps(sealed({name: value for name, value in json.loads(path.read_text()).items()
                                       if name != "save"})))  # fmt: skip
    assert believed(folder) == 30


@pytest.mark.parametrize("kind", ["a folder", "a link to nothing", "a pipe"])
def test_a_tracker_that_is_no_file_says_nothing(folder: Path, kind: str) -> None:
    (folder / TRACKER).unlink()
    STRANGERS[kind](folder / TRACKER)
    assert Checkpoints(folder).newest().iteration == 30


def test_given_weights_are_whole_or_refused_and_a_step_that_was_asked_for_is_the_one(folder: Path) -> None:
    guard.select_save(arguments(folder, ckpt_step=10))
    assert (folder / TRACKER).read_text() == "30"
    flip(folder / "iter_0000030" / "__1_0.distcp")
    with pytest.raises(UserError, match=r"__1_0.distcp: damaged.*iter_0000020 is whole: name it in latest"):
        guard.select_save(arguments(folder, load=None, pretrained_checkpoint=str(folder)))
    assert (folder / TRACKER).read_text() == "30"
    flip(folder / "iter_0000010" / "__0_0.distcp")
    with pytest.raises(UserError, match=r"iter_0000010/__0_0.distcp: damaged"):
        guard.select_save(arguments(folder, ckpt_step=10))


def test_a_save_of_others_is_loaded_when_it_is_trusted(folder: Path) -> None:
    for path in folder.glob("iter_*/integrity.json"):
        path.unlink()
    with pytest.raises(UserError, match=r"integrity.json: is missing.*--trust"):
        Checkpoints(folder).newest()
    assert Checkpoints(folder).newest(trust=True).iteration == 30
    guard.select_save(arguments(folder, trust=True))


def test_room_is_made_before_a_save_and_what_is_not_the_run_s_any_more_is_put_aside(folder: Path) -> None:
    """The two newest saves and multiples of the interval stay; an interrupted save is cleared away."""
    (folder / "iter_0000040").mkdir()
    (folder / "iter_0000040/__0_0.distcp").write_bytes(b"half")
    guard._make_room(folder, 40, 20)
    assert [one.iteration for one in Checkpoints(folder).saves()] == [30, 20]
    save(folder, 40)
    guard._make_room(folder, 50, 20)
    assert [one.iteration for one in Checkpoints(folder).saves()] == [40, 20]
    (folder / TRACKER).write_text("20")  # the user goes back
    guard._make_room(folder, 40, None)
    assert [one.iteration for one in Checkpoints(folder).saves()] == [20]
    Save(folder / "iter_0000040.aside", 40).check()


def test_a_folder_in_which_a_first_save_was_cut_off_holds_no_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path / "whole", 10), tmp_path / "cut/iter_0000010")
    (tmp_path / "cut/iter_0000010/integrity.json").unlink()
    assert not Checkpoints(tmp_path / "cut").exist
    assert Checkpoints(tmp_path / "whole").exist


def test_a_full_disk_is_known_by_its_words_or_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("a worker failed")
    error.__cause__ = OSError(28, "No space left on device")
    assert attempts.is_full(tmp_path, error)
    assert not attempts.is_full(tmp_path, RuntimeError("another reason"))
    monkeypatch.setattr(attempts.shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    assert attempts.is_full(tmp_path, RuntimeError("a worker failed"))


@pytest.mark.parametrize("tracked", ["30", "20"])
def test_the_newest_whole_save_stays_whatever_was_cut_off_behind_it(folder: Path, tracked: str) -> None:
    """None is a multiple of the interval; the one that was tracked last, or was not yet, was never sealed."""
    (folder / "iter_0000030/integrity.json").unlink()
    (folder / TRACKER).write_text(tracked)
    guard._make_room(folder, 40, 25)
    assert [one.iteration for one in Checkpoints(folder).saves() if (one.path / "integrity.json").is_file()] == [20]
    assert Checkpoints(folder).newest().iteration == 20


def test_room_is_reckoned_by_the_newest_whole_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "iter_0000030/integrity.json").unlink()
    size = sum(file.stat().st_size for file in (folder / "iter_0000020").iterdir())
    (folder / "iter_0000030/__0_0.distcp").write_bytes(b"")
    for free, fits in ((size, True), (size - 1, False)):
        monkeypatch.setattr(guard.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        with nullcontext() if fits else pytest.raises(UserError, match=r"^no room: .* needed, .* free$"):
            guard._make_room(folder, 40, None)
