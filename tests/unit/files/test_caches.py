"""Compiled code is taken only from where nobody but the user and root can have put it."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from omnibal_ext.files import caches
from omnibal_ext.files.caches import own_numba_cache, own_torch_caches, why_foreign, why_foreign_beside

ROOT = Path(__file__).parents[3]
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives files to another user")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "above/cache"
    (made / "inner").mkdir(parents=True)
    (made / "inner/a.nbi").touch()
    for path in (tmp_path, tmp_path / "above", made, made / "inner"):
        path.chmod(0o755)
    (made / "inner/a.nbi").chmod(0o644)
    return made


def given(path: Path) -> None:
    os.lchown(path, NOBODY, NOBODY)


def open_to(bits: int) -> Callable[[Path], None]:
    """Give write permission to others, in a group that is not the user's own."""

    def change(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, -1, NOBODY)
        path.chmod(path.stat().st_mode | bits)

    return change


PLACES = ("..", ".", "inner", "inner/a.nbi")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        pytest.param(given, "belongs to another user", marks=as_root),
        pytest.param(open_to(0o020), "may be written by its group", marks=as_root),
        (open_to(0o002), "may be written by everybody"),
    ],
)
def test_whatever_others_own_or_may_write_is_foreign(
    place: str, change: Callable[[Path], None], why: str, folder: Path
) -> None:
    assert why_foreign(folder) == ""
    path = (folder / place).resolve()
    change(path)
    assert why_foreign(folder) == f"{path} {why}" + (f" ({NOBODY})" if change is given else "")


def test_a_folder_that_leads_nowhere_for_others_may_have_any_modes_in_it(folder: Path) -> None:
    (folder / "inner/a.nbi").chmod(0o666)
    (folder / "inner").chmod(0o777)
    assert why_foreign(folder)
    folder.chmod(0o700)
    assert why_foreign(folder) == ""


def test_an_open_folder_above_is_as_tmp_if_only_owners_rename_in_it(folder: Path) -> None:
    folder.parent.chmod(0o1777)
    assert why_foreign(folder) == ""
    folder.chmod(0o1777)
    assert why_foreign(folder) == f"{folder} may be written by everybody"


@as_root
def test_a_link_is_followed_and_its_own_place_counts(folder: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert why_foreign(link) == ""
    given(link)
    assert why_foreign(link).startswith(f"{link} belongs")
    os.lchown(link, 0, 0)
    given(folder)
    assert why_foreign(link).startswith(f"{folder} belongs")


def test_a_group_of_the_user_alone_is_the_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o775)
    for theirs, why in ((False, "may be written by its group"), (True, "")):
        monkeypatch.setattr(caches, "_is_own_group", lambda _, theirs=theirs: theirs)
        assert why_foreign(folder).endswith(why)
        assert bool(why_foreign(folder)) == bool(why)


def test_beside_the_sources_who_may_write_these_may_write_there(tmp_path: Path) -> None:
    compiled = tmp_path / "pkg/__pycache__"
    compiled.mkdir(parents=True)
    (compiled / "a.nbi").touch(0o644)
    for mode, beside, why in (
        (0o755, 0o755, False),
        (0o757, 0o757, False),
        (0o755, 0o757, True),
        (0o757, 0o755, False),
    ):
        compiled.parent.chmod(mode)
        compiled.chmod(beside)
        assert bool(why_foreign_beside(tmp_path)) == why
    compiled.parent.chmod(0o755)
    (compiled / "a.nbi").chmod(0o646)
    assert why_foreign_beside(tmp_path) == f"{compiled / 'a.nbi'} may be written by everybody"


@as_root
def test_a_checkout_of_another_user_is_as_trusted_as_its_sources(tmp_path: Path) -> None:
    compiled = tmp_path / "pkg/__pycache__"
    compiled.mkdir(parents=True)
    given(compiled.parent)
    given(compiled)
    assert why_foreign_beside(tmp_path) == ""
    os.chown(compiled.parent, 0, 0)
    assert why_foreign_beside(tmp_path) == f"{compiled} belongs to another user ({NOBODY})"


@pytest.mark.parametrize("variable", ["NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"])
def test_a_foreign_cache_is_left_for_one_s_own_and_said_once(
    variable: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def decide() -> Path | None:
        return own_numba_cache(ROOT / "omnibal_ext") if "NUMBA" in variable else own_torch_caches()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "numba")
    for name in ("NUMBA_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(folder))
    decide()
    assert os.environ[variable] == str(folder)
    (folder / "inner/a.nbi").chmod(0o666)
    decide()
    own = Path(os.environ[variable])
    assert own.is_relative_to(tmp_path / "kept/omnibal")
    assert own.stat().st_mode & 0o777 == 0o700
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(
        f"warning: {folder}/inner/a.nbi may be written by everybody: compiled code there is not used"
    )
    assert f"set {variable} to" in said
    decide()
    assert (os.environ[variable], capsys.readouterr().err) == (str(own), "")


def test_a_folder_that_is_named_and_is_not_there_is_made_for_the_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "a/numba"))
    assert own_numba_cache(ROOT / "omnibal_ext") is None
    assert (tmp_path / "a/numba").stat().st_mode & 0o777 == 0o700


class Code:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (f"open({str(self.mark)!r}, 'w').close()",)


@pytest.mark.slow
def test_what_is_planted_where_numba_looks_does_not_run(tmp_path: Path) -> None:
    """numba's index of a function, which is there already: reading it is running it."""
    mark, shared = tmp_path / "ran", tmp_path / "numba"
    found = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "NUMBA_CACHE_DIR": str(shared),
        "XDG_CACHE_HOME": str(tmp_path / "k"),
    }
    use = [sys.executable, "-c", "from omnibal_ext.packing.random_bits import below; print(below(1, 2, 3))"]
    assert subprocess.run(use, env=found, check=True, capture_output=True, text=True).stderr == ""
    places = [*shared.rglob("*.nbi")]
    assert places
    for place in places:
        place.write_bytes(pickle.dumps(Code(mark)))
    shared.chmod(0o777)
    done = subprocess.run(use, env=found, check=False, capture_output=True, text=True)
    assert not mark.exists()
    assert (done.returncode, done.stdout) == (0, "0\n")
    assert done.stderr.startswith(f"warning: {shared} may be written by everybody: compiled code there is not used")
