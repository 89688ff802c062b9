"""setup.sh, smoke.sh, next_core.sh: a wrong Python costs a second; what is made is kept, what cannot be is said."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.programs import ROOT
from tests.waiting import PATIENCE

PYTHON = """#!/bin/bash
case "$*" in
    *print*) [[ -n "$ITS_VERSION" ]] && echo "$ITS_VERSION" ;;
    *ensurepip*) [[ -n "$ITS_VERSION" ]] ;;
    *version_info*) exit 1 ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "PATH=$3/bin:\\$PATH" >"$3/bin/activate" ;;
    *) echo "$* (${PIP_FIND_LINKS-unset}, ${OMNIBAL_TORCH-unset})" >>"$SAID"
       if [[ -n "$FAILS" && "$*" == *$FAILS* ]]; then echo "ERROR: no network"; exit 3; fi ;;
esac
"""
"""Stands for every Python: makes environments of itself, and notes what pip and programs are asked for."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    for name in ("omnibal_ext", "megatron", "tools", "examples", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "tests/smoke.py").touch()
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    for name, text in {"python3.12": PYTHON, "uv": "#!/bin/sh\nexit 1\n", "pyenv": "#!/bin/sh\nexit 1\n"}.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    return folder


def start(checkout: Path, script: str, *words: str, **settings: str) -> tuple[int, str, list[str]]:
    home, said = checkout.parent, checkout.parent / "said"
    said.unlink(missing_ok=True)
    environment = {name: value for name, value in os.environ.items() if name != "OMNIBAL_TORCH"} | {
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        **{"HOME": str(home), "XDG_CACHE_HOME": str(home / "kept"), "SAID": str(said), "PYTHON": "python3.12"},
        **{"ITS_VERSION": "3.12.1", "FAILS": "", "PIP_FIND_LINKS": "/wheels", **settings},
    }
    done = subprocess.run(
        ["bash", str(checkout / "scripts" / script), *words],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
    return done.returncode, done.stdout, said.read_text().splitlines() if said.exists() else []


@pytest.mark.parametrize("version", ["3.10.13", "3.14.0", "3.1.0", "2.7.18", ""])
def test_a_wrong_python_is_refused_before_anything_is_made(version: str, checkout: Path) -> None:
    code, said, asked = start(checkout, "setup.sh", ITS_VERSION=version)
    needed = rf"Python 3.11 to 3.13 is needed, .* python3.12 is {version or 'none that runs'}"
    assert re.fullmatch(rf"error: {needed}: PYTHON=python3.12 bash \S*setup.sh\n", said)
    assert (code, asked, (checkout / ".venv").exists()) == (2, [], False)


def test_an_environment_of_a_wrong_python_is_to_be_removed_first(checkout: Path) -> None:
    assert start(checkout, "setup.sh", FAILS="--editable")[0] == 3
    code, said, _ = start(checkout, "setup.sh", ITS_VERSION="3.10.13")
    assert code == 2
    assert ".venv/bin/python is 3.10.13: rm -r .venv, then PYTHON=python3.12 bash" in said


def test_a_first_try_has_no_tools_of_tests_and_tests_bring_them(checkout: Path) -> None:
    """One environment; what is there is not installed again."""
    _, said, asked = start(checkout, "setup.sh")
    assert "about 3 GB to download and 6 on disk with PyPI's torch" in said
    assert next(line for line in asked if " torch" in line).endswith(" torch==2.13.0 (/wheels, unset)")
    assert "--editable .[train] " in asked[-1]
    assert start(checkout, "setup.sh") == (0, "", [])
    assert "--editable .[train,demo,test] " in start(checkout, "setup.sh", "demo,test")[2][-1]
    for extras in ("demo", "demo,test", "test", ""):
        assert start(checkout, "setup.sh", extras) == (0, "", [])
    os.utime(checkout / "setup.py")
    assert "--editable .[train,demo,test] " in start(checkout, "setup.sh", "demo")[2][-1]


def test_another_torch_may_come_with_options(checkout: Path) -> None:
    _, _, asked = start(checkout, "setup.sh", OMNIBAL_TORCH="torch<3 --index-url https://example.org/cpu")
    assert any("--quiet torch<3 --index-url https://example.org/cpu (" in line for line in asked)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"ITS_VERSION": ""}, "no Python 3.12 is here"),
        ({"FAILS": "--dry-run"}, "no network: pip finds no torch (ERROR: no network)"),
    ],
)
def test_a_smoke_that_cannot_be_made_says_why(settings: dict[str, str], reason: str, checkout: Path) -> None:
    code, said, asked = start(checkout, "smoke.sh", **settings)
    assert (code, said.splitlines()[-1]) == (0, f"smoke: skipped: {reason}")
    assert len(asked) == ("FAILS" in settings)


def test_a_smoke_is_of_what_an_index_has_and_made_once(checkout: Path) -> None:
    """No wheels of this machine's, no torch that a user chose, and outside the checkout."""
    code, said, asked = start(checkout, "smoke.sh", OMNIBAL_TORCH="torch==9")
    assert code == 0, said
    assert "which are not the suite's" in said
    assert all(line.endswith("(, unset)") for line in asked)
    assert "--editable .[train,demo] " in asked[-2]
    assert "tests/smoke.py /" in asked[-1]
    assert not (checkout / ".venv").exists()
    code, said, asked = start(checkout, "smoke.sh")
    assert (code, len(asked)) == (0, 1)
    (checkout / "setup.py").write_text("# another\n")
    assert len(start(checkout, "smoke.sh")[2]) > 1


@pytest.mark.parametrize("fails", ["--editable", "tests/smoke.py"])
def test_what_fails_for_users_fails_the_smoke(fails: str, checkout: Path) -> None:
    code, said, _ = start(checkout, "smoke.sh", FAILS=fails)
    assert code != 0
    assert "skipped" not in said
    assert "ERROR: no network" in said


def test_the_newest_are_looked_for_each_time_and_tested(checkout: Path) -> None:
    for _ in range(2):
        code, said, asked = start(checkout, "smoke.sh", "--newest")
        assert code == 0, said
        assert any(line.endswith(" torch<3 (, torch<3)") for line in asked)
        assert "--editable .[train,demo,test] " in asked[-3]
        assert "tests/smoke.py" in asked[-2]
        assert "-m pytest" in asked[-1]


def test_core_s_next_version_is_on_the_path_of_its_tests_alone(checkout: Path) -> None:
    """The index's, or of a folder that is named; parity is that of two ranks."""
    for named, wanted in (({}, "megatron-core>=0.20"), ({"OMNIBAL_CORE_MAIN": "/their/main"}, "/their/main")):
        code, said, asked = start(checkout, "next_core.sh", **named)
        assert code == 0, said
        assert re.search(rf"pip install .*--target \S+/core .* {wanted} \(", asked[-3])
        assert "tests/unit/models" in asked[-2]
        assert re.findall(r"\[([a-z ]+)\]", asked[-1]) == ["one rank", "pipeline", "tensor", "data"]


@pytest.mark.parametrize(("named", "code"), [({}, 0), ({"OMNIBAL_CORE_MAIN": "/their/main"}, 2)])
def test_only_a_folder_that_is_named_must_build(named: dict[str, str], code: int, checkout: Path) -> None:
    found, said, asked = start(checkout, "next_core.sh", FAILS="--target", **named)
    assert found == code
    assert "ERROR: no network" in said
    assert ("skipped: " in said) == (not code)
    assert not any("pytest" in line for line in asked)
