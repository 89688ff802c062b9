"""The reference is made of the sources as they are, shows what is true of them, and has what examples import."""

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from tests.reference import PAGE, ROOT, reference

USERS = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py")])
OURS = ("omnibal_ext", "megatron.vlm")


def entries() -> list[tuple[str, str, str]]:
    found, module = [], ""
    parts = re.split(r"^#{3,4} `(\S+)`$", PAGE.read_text(), flags=re.MULTILINE)
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        module = name if "." in name else module
        if code := re.search(r"```python\n(.*?)\n```", text, re.DOTALL):
            found.append((module, name, code[1]))
    return found


def test_the_page_is_what_the_sources_say() -> None:
    assert PAGE.read_text() == reference(), "make it anew: python -m tests.reference"


@pytest.mark.parametrize(("module", "name", "signature"), entries(), ids=lambda part: part.partition("\n")[0])
def test_signatures_are_those_that_python_sees(module: str, name: str, signature: str) -> None:
    seen: Any = getattr(importlib.import_module(module), name)
    if signature == f"class {name}":
        assert not {"__init__", "__annotations__"} & set(vars(seen))
        return
    arguments = inspect.signature(seen).parameters.values()
    if "(" not in signature.partition("\n")[0]:  # a class that is made of its fields
        fields = [line.split(":")[0].strip() for line in signature.splitlines()[1:]]
        assert fields == [argument.name for argument in arguments]
        return
    shown = ast.parse(re.sub(r"^class", "def", signature) + ": ...").body[0]
    assert isinstance(shown, ast.FunctionDef)
    named = {argument.arg for argument in ast.walk(shown.args) if isinstance(argument, ast.arg)}
    assert named == {argument.name for argument in arguments}
    defaults = [default for default in [*shown.args.defaults, *shown.args.kw_defaults] if default]
    assert len(defaults) == sum(argument.default is not inspect.Parameter.empty for argument in arguments)


def imported(path: Path) -> set[tuple[str, str]]:
    """Modules and names of ours that a program, or the Python in a document, imports."""
    text = path.read_text()
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"^from (?:omnibal_ext|megatron\.vlm)\S* import .*$", text, re.MULTILINE))
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    return {
        (str(node.module), alias.name) for node in nodes if str(node.module).startswith(OURS) for alias in node.names
    }


def test_what_examples_and_documents_import_is_on_the_page() -> None:
    shown = {(module, name) for module, name, _ in entries()}
    constants = {("megatron.vlm.data.batches", "IGNORED"), ("megatron.vlm.platform", "HAS_CUDA")}
    short = {("omnibal_ext.packing", "pack")}  # of omnibal_ext.packing.in_memory
    wanted = {name for path in USERS for name in imported(path)}
    assert len(wanted) >= 8
    assert not wanted - shown - constants - short
