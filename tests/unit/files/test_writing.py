"""What we write appears complete or not at all, obeys the umask, replaces no link and no device, and what a kill leaves
of it is removed by the next start.
"""

import ast
import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.vlm.data.indexed_columns import ColumnWriter
from omnibal_ext.errors import UserError
from omnibal_ext.files.folders import building
from omnibal_ext.files.locks import working_on
from omnibal_ext.files.records import write_text
from omnibal_ext.files.writing import naming, remove_unfinished, replacing
from omnibal_ext.sizes import Sizes
from tests.unit.files.test_files import room

ROOT = Path(__file__).parents[3]


@contextmanager
def masked(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_files_and_folders_have_the_rights_that_the_umask_leaves(mask: int, tmp_path: Path) -> None:
    with masked(mask), building(tmp_path / "folder") as folder:
        write_text(folder / "file", "a")
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o777 & ~mask
    assert stat.S_IMODE((tmp_path / "folder/file").stat().st_mode) == 0o666 & ~mask


def test_links_stay_and_what_they_point_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/page").write_text("old")
    (tmp_path / "link").symlink_to("there/page")
    (tmp_path / "nowhere").symlink_to("there/new")
    (tmp_path / "folder").symlink_to("there", target_is_directory=True)
    write_text(tmp_path / "link", "new")
    write_text(tmp_path / "nowhere", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "there/page").read_text() == (tmp_path / "there/new").read_text() == "new"
    with building(tmp_path / "folder") as folder:
        (folder / "one").touch()
    assert (tmp_path / "folder").is_symlink()
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["one"]


def test_pipes_and_devices_are_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    found = list[str]()
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_text(tmp_path / "pipe", "page")
    reader.join()
    assert found == ["page"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    write_text(Path(os.devnull), "page")
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
    with pytest.raises(UserError, match="/dev/full: No space left on device; make room"):
        write_text(Path("/dev/full"), "page")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def killed(work: Callable[[], Any]) -> None:
    """Do it in a process that ends with the first write that is complete but for its name."""
    child = os.fork()
    if not child:
        try:
            os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
            work()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def build(target: Path) -> None:
    with building(target) as folder:
        write_text(folder / "one", "a")


def test_what_a_kill_leaves_is_removed_by_the_next_start(tmp_path: Path) -> None:
    for work, target in ((build, tmp_path / "folder"), (lambda path: write_text(path, "b"), tmp_path / "file")):
        killed(lambda work=work, target=target: work(target))  # type: ignore[misc]
        (left,) = tmp_path.glob(f".{target.name}.*")
        write_text(tmp_path / "another", "c")
        assert left.exists()
        work(target)
        assert not list(tmp_path.glob(".*"))
    killed(lambda: write_text(tmp_path / "x.npz", "d"))
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "file", "folder"]


def test_what_is_being_written_is_not_removed(tmp_path: Path) -> None:
    with building(tmp_path / "folder") as folder, replacing(tmp_path / "file") as file:
        child = os.fork()
        if not child:
            remove_unfinished(tmp_path)
            os._exit(0)
        os.waitpid(child, 0)
        file.write(b"a")
        (folder / "one").touch()
    assert (tmp_path / "file").read_bytes() == b"a"
    assert (tmp_path / "folder/one").exists()


def test_hidden_files_of_others_are_not_removed(tmp_path: Path) -> None:
    names = [".a.lock", ".a", ".a.123", "a.0123456789abcdef", ".b.0123456789abcdef0"]
    for name in names:
        (tmp_path / name).touch()
    remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


def write_column(folder: Path) -> None:
    writer = ColumnWriter(folder, "tokens")
    writer.append(np.zeros(9000, np.int32), np.array([9000]))
    writer.close()


WRITERS: dict[str, Callable[[Path], None]] = {
    "sizes.npz": lambda folder: Sizes.from_arrays([1] * 3000, [1] * 3000).save(folder / "sizes.npz"),
    "tokens.bin": write_column,
    "page.html": lambda folder: write_text(folder / "page.html", "a" * 9000),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_names_the_file(name: str, tmp_path: Path) -> None:
    with room(5000), pytest.raises(UserError, match=rf"{name}: File too large; make room and start again"):
        WRITERS[name](tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_numpy_says_nothing_of_the_cause_and_the_file_is_named(tmp_path: Path) -> None:
    with (
        room(5000),
        pytest.raises(UserError, match=r"a\.npy: .*; make room and start again"),
        naming(tmp_path / "a.npy"),
    ):
        np.save(tmp_path / "a.npy", np.zeros(9000))


def test_a_lock_is_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "private").write_text("mine")
    (tmp_path / ".out.lock").symlink_to("private")
    with pytest.raises(UserError, match=r"\.out\.lock: cannot be written"), working_on(tmp_path / "out"):
        pass
    assert (tmp_path / "private").read_text() == "mine"
    os.mkfifo(tmp_path / ".pipe.lock")
    with pytest.raises(UserError, match="no regular file"), working_on(tmp_path / "pipe"):
        pass
    with pytest.raises(UserError, match="File name too long"), working_on(tmp_path / ("a" * 250)):
        pass


ELSEWHERE = {
    "megatron/vlm/ending.py _tell_torchrun": "torchrun's own file, in its own folder",
    "megatron/vlm/hf/convert.py _copy_all_but_weights": "into a folder that was made empty",
    "megatron/vlm/preprocessing/merge.py merge": "a folder that this job alone has, moved to its place",
    "megatron/vlm/checkpoint/guard.py _rename_superseded": "a save that is set aside",
    "omnibal_ext/__init__.py forget_stale": "beside the compiled functions; imports nothing",
    "omnibal_ext/launch/candidates.py measured_best": "the output of other programs",
    "omnibal_ext/launch/folder.py number_old_files": "files of an earlier run, which keep their content",
    "omnibal_ext/launch/scratch.py _made": "the folder of temporary files itself",
    "tools/launch.py _start": "the output of other programs",
}
"""Functions that write without the door, and why they may."""
CALLS = {
    "write_text", "write_bytes", "tofile", "mkdtemp", "mkstemp", "chmod", "copyfile", "copytree", "rename",
    "NamedTemporaryFile", "symlink_to",
}  # fmt: skip
OF_MODULES = {"np", "numpy", "torch", "shutil", "tempfile", "os"}


def writes(call: ast.Call) -> bool:
    """Whether a call makes or replaces a file: by its name, and for `open` by its mode."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    of = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if name in ("open", "fdopen"):
        modes = [
            word.value for word in (*call.args, *(key.value for key in call.keywords)) if isinstance(word, ast.Constant)
        ]
        return any(isinstance(mode, str) and set(mode) <= set("wax+rbt") and set(mode) & set("wax+") for mode in modes)
    if name in ("save", "savez", "savez_compressed"):  # to an open file, which is another's concern
        return of in OF_MODULES and not (call.args and ast.unparse(call.args[0]) == "file")
    if name in ("copy", "move", "replace"):  # texts and dictionaries have them too
        return of in OF_MODULES
    return name in CALLS and bool(of)  # not the door's own `write_text`


def test_files_are_written_by_the_door_alone() -> None:
    found = set[str]()
    for top in ("megatron/vlm", "omnibal_ext", "tools"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if path.is_relative_to(ROOT / "omnibal_ext/files"):
                continue
            tree = ast.parse(path.read_text())
            for function in ast.walk(tree):
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
                    inside = [node for node in own_nodes(function) if isinstance(node, ast.Call) and writes(node)]
                    name = getattr(function, "name", "(module)")
                    found |= {f"{path.relative_to(ROOT)} {name}"} if inside else set()
    assert found == ELSEWHERE.keys()


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from own_nodes(child)
