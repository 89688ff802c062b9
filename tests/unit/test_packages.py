"""`omnibal` alone is the packer and the planner; what an extra brings is said with its name where it is missing."""

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement

from omnibal_ext import errors
from omnibal_ext.errors import run_tool
from tests.programs import ROOT, fresh_python

NAMES = {"PIL": "pillow", "sklearn": "scikit-learn", "megatron": "megatron-core"}
"""Of distributions, where they are not their module's."""
TRAINING = {*errors.EXTRAS["train"], "megatron.core", "megatron.training"} - {"megatron"}
WITHOUT = f"import sys\nfor name in {sorted(TRAINING)}: sys.modules[name] = None\n"
"""A machine that has `omnibal` without extras."""


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", found.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    return found


def distributions(requirements: list[str]) -> set[str]:
    return {Requirement(line).name for line in requirements}


def for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported(room: str, at_once: bool) -> set[str]:
    """The packages of others that a room's modules import, or import `at_once`: outside functions."""

    def found(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield ".".join(node.module.split(".")[:2]) if node.module[:8] == "megatron" else node.module.split(".")[0]
        elif not (at_once and isinstance(node, ast.FunctionDef)) and not for_types(node):
            for child in ast.iter_child_nodes(node):
                yield from found(child)

    names = {name for path in (ROOT / room).rglob("*.py") for name in found(ast.parse(path.read_text()))}
    return names - set(sys.stdlib_module_names) - {"omnibal_ext", "omnibal_tools", "megatron.vlm"}


EXTRAS = re.compile(
    r"(?:omnibal|WHEEL|CLONE|['\" ]\.)\[([a-z,]+)\]|source .*/setup\.sh\" ([a-z,]+)|how_to_install\('([a-z]+)'"
)


def test_every_extra_that_is_named_anywhere_exists(described: dict[str, Any]) -> None:
    texts = [*(ROOT / name for name in ("Dockerfile", ".ci/run", "README.md", "CONTRIBUTING.md")),
             *(path for room in ("docs", "scripts", "tools", "examples", "omnibal_ext", "megatron/vlm")
               for path in (ROOT / room).rglob("*") if path.suffix in (".md", ".sh", ".sbatch", ".py"))]  # fmt: skip
    named = {(extra, path.name) for path in texts for words in EXTRAS.findall(path.read_text())
             for extra in "".join(words).split(",")}  # fmt: skip
    assert {path for _, path in named} >= {"Dockerfile", "test.sh", "first-run.md", "videos.py", "gpu.md"}
    assert sorted(one for one in named if one[0] not in described["extras_require"]) == []


@pytest.mark.parametrize("package", ["jinja2"])
def test_versions_with_known_holes_are_not_allowed(package: str, described: dict[str, Any]) -> None:
    """CVE-2025-27516: up to 3.1.5 `|attr('format')` leaves the sandbox that runs chat templates."""
    (wanted,) = (one for line in described["install_requires"] if (one := Requirement(line)).name == package)
    assert [one for one in ("3.1.0", "3.1.5", "3.1.6", "3.2") if one in wanted.specifier] == ["3.1.6", "3.2"]


def test_the_base_is_what_packing_and_planning_import(described: dict[str, Any]) -> None:
    base = distributions(described["install_requires"])
    assert not base & {"torch", "megatron-core", "sentencepiece", "pillow", "transformers"}
    assert imported("omnibal_ext", at_once=True) <= base


def test_training_imports_what_its_extra_brings(described: dict[str, Any]) -> None:
    """All that any module imports when it is loaded; what is imported later is there, asked for, or another extra's."""
    brought = distributions(described["install_requires"]) | distributions(described["extras_require"]["train"])
    needed = {NAMES.get(name.partition(".")[0], name) for room in ("megatron/vlm", "tools")
              for name in imported(room, at_once=True)}  # fmt: skip
    kernels = {"transformer_engine"}  # in files that are loaded where it is installed
    assert {name.replace("_", "-") for name in needed - kernels} <= {name.replace("_", "-") for name in brought}


def test_the_table_is_the_one_of_the_extras(described: dict[str, Any]) -> None:
    assert set(errors.EXTRAS) == set(described["extras_require"]) - {"docs", "test"}
    for extra, modules in errors.EXTRAS.items():
        names = {NAMES.get(module, module) for module in modules}
        assert names == distributions(described["extras_require"][extra]), extra


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("torch.nn", "torch, which is not installed: pip install '.[train]' in a clone of this project"),
        ("tokenizers", "tokenizers, which is not installed: pip install '.[train]' in a clone of this project"),
        ("pyarrow", "pyarrow, which is not installed: pip install '.[tables]' in a clone of this project"),
        ("av", "av, which is not installed: pip install '.[video]' in a clone of this project"),
        ("trl.trainer", "trl, which is not installed: pip install trl"),
        ("somebody_elses", ""),
    ],
)
def test_what_is_missing_is_said_with_its_extra(module: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert errors.missing_package("numpy") == errors.missing_package("torch") == ""
    monkeypatch.setattr(errors, "find_spec", lambda _: None)
    assert errors.missing_package(module) == said


def test_megatron_core_for_python_3_11_is_one_that_pip_does_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "megatron.core" else object())
    monkeypatch.setattr(errors.sys, "version_info", (3, 12))
    assert errors.missing_package("megatron.core.utils").endswith(": pip install '.[train]' in a clone of this project")
    monkeypatch.setattr(errors.sys, "version_info", (3, 11))
    wanted = errors.missing_package("megatron.core.utils").partition("pip install ")[2]
    assert wanted == "--no-deps --ignore-requires-python 'megatron-core>=0.19.2,<0.20'"
    assert wanted.split("'")[1] in (ROOT / "setup.py").read_text()
    assert wanted.split("'")[1] in (ROOT / "scripts/setup.sh").read_text()


def test_a_module_that_nobody_s_extra_brings_is_a_fault_of_ours() -> None:
    def main() -> None:
        raise ModuleNotFoundError("No module named 'nowhere'", name="nowhere")

    with pytest.raises(ModuleNotFoundError):
        run_tool(main)


def without_extras(program: str, *words: object) -> subprocess.CompletedProcess[str]:
    code = f"{WITHOUT}import runpy\nsys.argv = {['tool', *map(str, words)]}\n"
    code += f"runpy.run_path({str(ROOT / 'tools' / program)!r}, run_name='__main__')"
    return fresh_python("-c", code)


NEEDING = {
    "preprocess_data.py": ("--input", "chat.jsonl", "--output-dir", "data"),
    "make_demo_data.py": ("--help",),
    "prove_packs.py": ("--model", ".", "--samples", "json:loads", "--collator", "json:loads"),
    "convert_checkpoint.py": ("--from-hf", "model", "--output-dir", "ours"),
    "profile_layers.py": ("--model", "tiny", "--vit-budget", 4, "--llm-budget", 64, "--output", "profile.json"),
}
"""Every tool that needs more than the base, and words with which it comes to that."""


@pytest.mark.starts
@pytest.mark.parametrize("program", sorted(path.name for path in (ROOT / "tools").glob("[!_]*.py")))
def test_a_tool_works_without_training_s_packages_or_names_their_extra(program: str, tmp_path: Path) -> None:
    if NEEDING.get(program) != ("--help",):
        done = without_extras(program, "--help")
        assert done.returncode == 0, done.stderr
        assert "usage" in done.stdout
    if program in NEEDING:
        done = without_extras(program, *NEEDING[program])
        assert done.returncode == 2, done.stderr
        lacks = r"error: this needs \w+, which is not installed: pip install '\.\[train\]' in a clone of this project\n"
        assert re.fullmatch(lacks, done.stderr)


@pytest.mark.starts
@pytest.mark.parametrize("missing", errors.EXTRAS["remote"])
def test_a_store_without_its_extra_is_a_line(missing: str) -> None:
    code = f"import runpy, sys\nsys.modules[{missing!r}], sys.argv = None, ['look', 's3://bucket/a.json']\n"
    done = fresh_python("-c", f"{code}runpy.run_path({str(ROOT / 'tools/look.py')!r}, run_name='__main__')")
    lacks = f"{missing}, which is not installed: pip install '.[remote]' in a clone of this project"
    assert (done.returncode, done.stderr) == (2, f"error: s3://bucket/a.json: cannot be read: {lacks}\n")


@pytest.mark.starts
def test_who_names_no_store_imports_nothing_of_the_extra(tmp_path: Path) -> None:
    (tmp_path / "sizes.json").write_text('[{"token_num": 5, "vit_num": 2}, {"token_num": 7, "vit_num": 1}]')
    words = ["look", str(tmp_path / "sizes.json"), "--json"]
    code = f"{WITHOUT}import runpy\nsys.argv = {words}\nruns = {str(ROOT / 'tools/look.py')!r}\n"
    code += "try: runpy.run_path(runs, run_name='__main__')\nexcept SystemExit as end: assert not end.code, end.code\n"
    done = fresh_python(
        "-c", f"{code}print(sorted({{*{errors.EXTRAS['remote']}, 'aiohttp', 'asyncio'}} & {{*sys.modules}}))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_scripts_and_setup_agree_on_the_python() -> None:
    setup = (ROOT / "setup.py").read_text()
    (low, high) = map(int, re.findall(r'python_requires=">=3\.(\d+),<3\.(\d+)"', setup)[0])
    minors = [str(minor) for minor in range(low, high)]
    script = (ROOT / "scripts/setup.sh").read_text()
    assert f"Python 3.{minors[0]} to 3.{minors[-1]} is needed" in script
    assert re.findall(r"\^3\\\.1\[(\d+)\]", script) == ["".join(minor[1:] for minor in minors)]
    assert re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', setup) == minors
    for document in ("README.md", "CONTRIBUTING.md"):
        assert f"Python 3.{minors[0]} to 3.{minors[-1]}" in (ROOT / document).read_text()
