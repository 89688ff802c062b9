"""The reference of what people import, docs/api.md, made of signatures and docstrings: `python -m tests.reference`.

It is read out of the sources, nothing is imported. `tests/unit/test_reference.py` holds that it is up to date.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/api.md"
WIDTH = 120
HEAD = """# Reference

For those who import the packages: `omnibal_ext` needs neither torch nor Megatron, `megatron.vlm` torch and
megatron-core. Names that begin with an underscore, and modules that are not here, may change with any version.
Explained in [packing.md](packing.md), [integrations.md](integrations.md), [loops.md](loops.md),
[streams.md](streams.md), [planning.md](planning.md) and [models.md](models.md); generated from docstrings by
`python -m tests.reference`.
"""
ROOMS = {
    "Samples to packs": (
        "omnibal_ext.packing.in_memory",
        "omnibal_ext.sizes", "omnibal_ext.packing.options", "omnibal_ext.packing.costs", "omnibal_ext.packing.build",
        "omnibal_ext.packing.index.packed_index", "omnibal_ext.packing.index.sampler",
        "omnibal_ext.packing.index.summary",
    ),
    "Other trainers": (
        "omnibal_ext.integrations.energon",
        "omnibal_ext.integrations.megatron_bridge",
        "omnibal_ext.integrations.ms_swift",
        "omnibal_ext.integrations.nemo_automodel",
        "omnibal_ext.integrations.veomni",
        "omnibal_ext.integrations.llama_factory",
        "omnibal_ext.integrations.axolotl",
        "omnibal_ext.integrations.streams",
        "omnibal_ext.integrations.torch_loops",
        "omnibal_ext.integrations.samples",
        "omnibal_ext.joining.pack_positions",
        "omnibal_ext.joining.checks",
    ),
    "Packs to batches": (
        "megatron.vlm.data.dataset", "megatron.vlm.data.dataset_folder", "megatron.vlm.data.sample",
        "megatron.vlm.hf.packs", "megatron.vlm.data.batches",
    ),
    "Batches that are not packed": (
        "omnibal_ext.rebalance.phases",
        "omnibal_ext.rebalance.plan",
        "megatron.vlm.data.stream",
    ),
    "Plans and runs": ("omnibal_ext.plan", "omnibal_ext.run_metrics"),
    "Models and weights": ("omnibal_ext.architectures.presets", "megatron.vlm.hf.convert"),
    "What is wrong": ("omnibal_ext.errors",),
}  # fmt: skip


def reference() -> str:
    """The page."""
    return "\n".join([HEAD, *(line for room, modules in ROOMS.items() for line in _room(room, modules))])


def _room(room: str, modules: tuple[str, ...]) -> Iterator[str]:
    yield f"## {room}\n"
    for module in modules:
        tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
        yield f"### `{module}`\n\n{_said(tree)}\n"
        for node in _public(tree):
            made = _class(node) if isinstance(node, ast.ClassDef) else _function(node)
            yield f"#### `{node.name}`\n\n```python\n{made}\n```\n\n{_said(node)}\n"
            if isinstance(node, ast.ClassDef) and (members := list(_members(node))):
                yield "\n".join(members) + "\n"


def _public(scope: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node


def _class(node: ast.ClassDef) -> str:
    """How one is made: by its `__init__`, or of its fields."""
    made = next((inner for inner in node.body if getattr(inner, "name", "") == "__init__"), None)
    if isinstance(made, ast.FunctionDef):
        return _broken(f"class {node.name}", _arguments(made)[1:], "")
    return "\n".join([f"class {node.name}", *(f"    {ast.unparse(field)}" for field in _fields(node))])


def _fields(node: ast.ClassDef) -> Iterator[ast.AnnAssign]:
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and not ast.unparse(field.target).startswith("_"):
            yield field


def _function(node: ast.FunctionDef) -> str:
    return _broken(f"def {node.name}", _arguments(node), _returns(node))


def _broken(head: str, arguments: list[str], returns: str) -> str:
    whole = f"{head}({', '.join(arguments)}){returns}"
    return (
        whole if len(whole) <= WIDTH else "\n    ".join([f"{head}(", *(f"{a}," for a in arguments)]) + f"\n){returns}"
    )


def _returns(node: ast.FunctionDef) -> str:
    return f" -> {ast.unparse(node.returns)}" if node.returns else ""


def _arguments(node: ast.FunctionDef) -> list[str]:
    """Each as it is written, with what it is by default."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(plain) - len(given.defaults)), *given.defaults]
    more = [f"*{ast.unparse(given.vararg)}"] if given.vararg else ["*"] if given.kwonlyargs else []
    pairs = [zip(plain, defaults, strict=True), zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    first, last = ([_argument(name, default) for name, default in pair] for pair in pairs)
    return [*first, *more, *last, *([f"**{ast.unparse(given.kwarg)}"] if given.kwarg else [])]


def _argument(name: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(name) + (f" = {ast.unparse(default)}" if default else "")


def _members(node: ast.ClassDef) -> Iterator[str]:
    """Fields that say something, methods and properties, as a list."""
    fields = set(_fields(node))
    for field, said in pairwise(node.body):
        if field in fields and isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant):
            yield _entry(ast.unparse(field.target), _shown(inspect.cleandoc(str(said.value.value))))  # type: ignore[attr-defined]
    for method in _public(node):
        if isinstance(method, ast.FunctionDef):
            yield _entry(_called(method), _said(method))


def _called(method: ast.FunctionDef) -> str:
    decorators = {ast.unparse(decorator) for decorator in method.decorator_list}
    if decorators & {"property", "cached_property"}:
        return method.name + _returns(method).replace(" ->", ":")
    arguments = _arguments(method) if "staticmethod" in decorators else _arguments(method)[1:]
    return f"{method.name}({', '.join(arguments)}){_returns(method)}"


def _entry(name: str, text: str) -> str:
    return f"- `{name}`  \n" + "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _said(node: ast.Module | ast.FunctionDef | ast.ClassDef) -> str:
    return _shown(ast.get_docstring(node) or "")


def _shown(text: str) -> str:
    """As Markdown shows it: columns as they stand, and a `<` outside of code begins no tag."""
    return "\n\n".join(map(_paragraph, text.split("\n\n")))


def _paragraph(text: str) -> str:
    lines = text.splitlines()
    if all(re.search(r" {2,}\S", line) for line in lines):
        return "\n".join(line if text.startswith("    ") else f"    {line}" for line in lines)
    pieces = re.split("(`[^`]*`)", text)
    return "".join(piece if number % 2 else piece.replace("<", "&lt;") for number, piece in enumerate(pieces))


if __name__ == "__main__":
    PAGE.write_text(reference())
