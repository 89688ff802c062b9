"""After any source has changed, nothing runs that numba has compiled of older ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omnibal_ext import forget_stale

CALLEE = "from numba import njit\n@njit(cache=True)\ndef inner():\n    return {}\n"
CALLER = "from numba import njit\nfrom pkg.inner import inner\n@njit(cache=True)\ndef outer():\n    return inner()\n"
RUN = "import pathlib, pkg; {}; from pkg.outer import outer; print(outer())"
FORGET = "from omnibal_ext import forget_stale; forget_stale(pathlib.Path(pkg.__file__).parent)"


def said(folder: Path, code: str) -> str:
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[2])])}
    words = [sys.executable, "-W", "ignore", "-c", RUN.format(code)]
    return subprocess.run(words, capture_output=True, text=True, check=True, env=os.environ | paths).stdout


@pytest.mark.slow
def test_a_caller_is_compiled_again_with_a_changed_function_of_another_file(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "outer.py").write_text(CALLER)
    (package / "inner.py").write_text(CALLEE.format(1))
    assert said(tmp_path, "pass") == "1\n"
    (package / "inner.py").write_text(CALLEE.format(22))
    assert said(tmp_path, "pass") == "1\n"
    assert said(tmp_path, FORGET) == "22\n"


def test_what_is_compiled_of_these_sources_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import numba")
    forget_stale(tmp_path)
    compiled = tmp_path / "__pycache__/a.nbi"
    compiled.touch()
    (tmp_path / "c.py").write_text("has nothing to compile")
    forget_stale(tmp_path)
    assert compiled.exists()
    (tmp_path / "b.py").write_text("from numba import njit")
    forget_stale(tmp_path)
    assert not compiled.exists()
