"""What is built installs beside pip's megatron-core: no claim on `megatron`, all its files, the command `omnibal`."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from omnibal_ext import STAMP
from omnibal_ext.packing.index.packed_index import PackedIndex
from tests.programs import ROOT
from tests.unit.report.subjects import planned

pytestmark = pytest.mark.starts
BUILT_FROM = (
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "MANIFEST.in",
    "omnibal_ext",
    "megatron",
    "tools",
    "examples",
)


HOME = "https://example.org/own/er"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built: building leaves files beside it."""
    source = tmp_path_factory.mktemp("package") / "source"
    source.mkdir()
    for name in BUILT_FROM:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(path, source / name)
    return source


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """The wheel, beside its source distribution and what an index is told where the builder has a home to name."""
    folder = source.parent
    build = f"""import os, setuptools.build_meta as b
print(b.build_wheel(r'{folder}'), b.build_sdist(r'{folder}'))
os.environ['OMNIBAL_HOME'] = '{HOME}/'
print(b.prepare_metadata_for_build_wheel(r'{folder}'))
"""
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return next(folder.glob("*.whl"))


def test_the_wheel_claims_its_own_names_only_and_has_all_of_them(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {path for path in names if ".dist-info/" not in path}
    assert {path.split("/")[0] for path in packaged} == {"omnibal_ext", "omnibal_tools", "megatron"}
    assert all(path.startswith("megatron/vlm/") for path in packaged if path.startswith("megatron/"))
    ours = {str(p.relative_to(ROOT)) for room in ("omnibal_ext", "megatron/vlm") for p in (ROOT / room).rglob("*.py")}
    ours |= {f"omnibal_tools/{path.name}" for path in (ROOT / "tools").glob("*.py")}
    ours |= {str(path.relative_to(ROOT)) for path in (ROOT / "omnibal_ext/report/templates").iterdir()}
    ours |= {str(path.relative_to(ROOT)) for path in (ROOT / "omnibal_ext/families").rglob("*.jinja")}
    ours |= {f"omnibal_tools/recipes/{path.name}" for path in (ROOT / "examples/recipes").glob("*.json")}
    ours |= {"omnibal_ext/py.typed", "megatron/vlm/py.typed"}  # who imports them is checked against their types
    assert packaged == ours
    assert any(name.endswith("licenses/LICENSE") for name in names)


def told(metadata: str) -> tuple[Message, dict[str, str]]:
    """The fields of a METADATA file and its URLs by name."""
    fields = email.message_from_string(metadata)
    return fields, dict(url.split(", ", 1) for url in fields.get_all("Project-URL", []))


def test_an_index_is_told_what_it_shows(wheel: Path) -> None:
    """Nothing lies beside a page of an index: links lead to the repository's home where there is one, or nowhere."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        fields, urls = told(archive.read(name).decode())
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.11"} < set(fields.get_all("Classifier", []))
    assert "sequence packing" in fields["Keywords"]
    assert list(urls) == ["Paper"]
    link = re.compile(r"\]\((?!https://arxiv|#)[^)]*\)")
    readme = (ROOT / "README.md").read_text()
    assert len(link.findall(readme)) > 10
    assert not link.findall(fields.get_payload())
    assert "docs/data.md" in fields.get_payload()
    assert "timeline.png" not in fields.get_payload()
    assert fields["Author"] in (ROOT / "CITATION.cff").read_text()
    assert "pip install 'omnibal[train]'" in fields.get_payload()
    assert not re.search(r"bash scripts/\w+\.sh|^In a clone, ", fields.get_payload(), re.MULTILINE)
    fields, urls = told(next(wheel.parent.glob("*.dist-info/METADATA")).read_text())
    assert urls["Changelog"] == f"{HOME}/blob/main/CHANGELOG.md"
    assert list(urls) == ["Paper", "Source", "Documentation", "Changelog", "Issues"]
    assert f"({HOME}/raw/main/docs/timeline.png)" in fields.get_payload()
    linked = link.findall(fields.get_payload())
    assert len(linked) == len(link.findall(readme))
    assert all(there.startswith(f"]({HOME}/") for there in linked)


def test_the_source_distribution_builds_the_same(wheel: Path) -> None:
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "LICENSE", "tools/launch.py", "omnibal_ext/report/templates/report.js"} <= names
    assert "omnibal_ext/families/glm_v/glm-4.5v.jinja" in names
    assert "examples/recipes/qwen3-vl-8b-8xh100.json" in names
    assert "megatron/__init__.py" not in names


def bring_compiled(installed: Path) -> None:
    """What numba has compiled of the very same files, and the stamp that says so."""
    for compiled in (ROOT / "omnibal_ext").rglob("__pycache__/*"):
        if compiled.name == STAMP or compiled.suffix in (".nbi", ".nbc"):
            (installed / compiled.relative_to(ROOT)).parent.mkdir(exist_ok=True)
            shutil.copy(compiled, installed / compiled.relative_to(ROOT))


COMMANDS = """
import contextlib, io, json, sys
from omnibal_tools.__main__ import main
found = []
for words in json.loads(sys.argv[1]):
    sys.argv, code = ["omnibal", *words], 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    found.append([code, out.getvalue(), errors.getvalue()])
print(json.dumps(found))
"""
"""Runs one after the other; exit code, stdout and stderr of each."""


def test_the_command_is_the_tools(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    bring_compiled(installed)
    assert (installed / "omnibal_tools/recipes/qwen3-vl-8b-8xh100.json").exists()
    (entry,) = installed.glob("*.dist-info/entry_points.txt")
    assert "omnibal=omnibal_tools.__main__:main" in entry.read_text().replace(" ", "")
    planned(tmp_path)
    budgets = ("--vit-budget", "7", "--llm-budget", "4096")
    asked = [
        ("pack", "--sizes", "sizes.npz", *budgets, "--output-dir", "again", "--report", "packing.html"),
        ("report", "--plan", "plan.json", "--output", "report.html"), ("level", "--help"), ("pakc",),
        ("report", "--output", "r.html"),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(installed), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", COMMANDS, json.dumps(asked)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    packed, reported, helped, wrong, refused = json.loads(done.stdout.splitlines()[-1])
    assert packed[0] == reported[0] == 0, done.stdout
    assert PackedIndex.open(tmp_path / "again").num_packs > 0
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert helped[1].startswith("usage: omnibal level [-h]")
    assert wrong[0] == 2
    assert "the nearest is pack, all are look, preprocess, pack, level" in wrong[2]
    assert (refused[0], refused[2].count("\n")) == (2, 1)
