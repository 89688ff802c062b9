"""Where our code asks what machine it is on, and which tests go either way.

    python -m tests.branches              every question, and its two tests
    python -m tests.branches --record     runs `TESTS`, notes which answers they give, and writes the table

A question is a condition in which one of `ASKED` stands. The class of fault it is for: where there is CUDA, another
branch runs, and no test takes it. `tests/unit/test_branches.py` holds that the table has both answers of every one.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("megatron/vlm", "omnibal_ext", "tools", "benchmarks")
TABLE = Path(__file__).with_name("branches.json")
"""Of every question the tests in which its answer is yes, and no."""
ASKED = frozenset({
    "HAS_CUDA", "HAS_TRANSFORMER_ENGINE", "HAS_FLASH_ATTENTION", "HAS_FLASH_ATTENTION_4", "HAS_VARIABLE_LENGTH",
    "HAS_LINEAR_ATTENTION", "HAS_APEX", "UNUSABLE", "unseen_gpu", "installed", "usable",
    "empty_groups_are_left_out", "by_transformer_engine", "delays", "is_te_min_version",
    "get_device_capability", "device_key", "HAVE_APEX_OR_TE", "local_multi_tensor_l2_norm", "get_backend", "is_meta",
    "_event", "te_return_bias", "fuse_wgrad_accumulation",
})  # fmt: skip
TESTS = (
    "tests/cards", "tests/unit/test_platform.py", "tests/unit/test_machine.py", "tests/unit/test_gpu_benchmark.py",
    "tests/unit/test_optional.py",
    "tests/unit/models/test_linear_attention.py",
    "tests/unit/models/test_attention.py", "tests/unit/models/test_experts.py", "tests/unit/models/test_fp8.py",
    "tests/unit/flags", "tests/unit/preflight", "tests/unit/profiling/test_profiler.py",
    "tests/unit/data/test_arrival.py", "tests/unit/data/test_loader.py", "tests/unit/pipeline",
    "tests/unit/test_progress.py", "tests/system/test_training.py", "tests/distributed/test_training.py",
)  # fmt: skip
"""That go all ways between them."""


def is_ours(path: Path) -> bool:
    """Whether a file is of the project's own code."""
    return path.suffix == ".py" and any((ROOT / room) in path.parents for room in ROOMS)


def questions() -> Iterator[str]:
    """All, file by file: FILE::FUNCTION: CONDITION."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            keys: list[str] = []
            _Wrap(path, keys).visit(ast.parse(path.read_text()))
            yield from keys


def noting(tree: ast.Module, path: Path) -> ast.Module:
    """The same code, in which `__noted__` sees the value of every question."""
    changed = ast.fix_missing_locations(_Wrap(path, []).visit(tree))
    assert isinstance(changed, ast.Module)
    return changed


class _Wrap(ast.NodeTransformer):
    """Notes the keys of questions, and calls `__noted__` around them."""

    def __init__(self, path: Path, keys: list[str]) -> None:
        self.file, self.keys, self.inside = str(path.relative_to(ROOT)), keys, ["module"]

    def _of_function(self, node: ast.AST) -> ast.AST:
        self.inside.append(getattr(node, "name", ""))
        found = self.generic_visit(node)
        self.inside.pop()
        return found

    visit_FunctionDef = visit_ClassDef = _of_function  # noqa: N815 (as `ast` calls them)

    def _of_condition(self, node: ast.AST) -> ast.AST:
        test = node.test  # type: ignore[attr-defined]
        if _asks(test):
            node.test = self._noted(test)  # type: ignore[attr-defined]
            return self._without(node, "test")
        return self.generic_visit(node)

    visit_If = visit_IfExp = visit_While = _of_condition  # noqa: N815

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        """Its filters are conditions too."""
        node.ifs = [self._noted(test) if _asks(test) else test for test in node.ifs]
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        """One whose value is kept."""
        return self._noted(node) if _asks(node) else self.generic_visit(node)

    def _without(self, node: ast.AST, done: str) -> ast.AST:
        """Visit all fields but one that is done."""
        kept = getattr(node, done)
        setattr(node, done, ast.Constant(value=None))
        self.generic_visit(node)
        setattr(node, done, kept)
        return node

    def _noted(self, test: ast.expr) -> ast.expr:
        key = f"{self.file}::{'.'.join(self.inside[1:]) or 'module'}: {ast.unparse(test)}"
        self.keys.append(key)
        return ast.Call(ast.Name("__noted__", ast.Load()), [ast.Constant(key), test], [])


def _asks(node: ast.AST) -> bool:
    names = {getattr(part, "id", None) or getattr(part, "attr", None) for part in ast.walk(node)}
    return bool(ASKED & names)


def table() -> dict[str, list[str]]:
    """Of every question its two tests; "" where there was none."""
    known: dict[str, list[str]] = json.loads(TABLE.read_text())
    return known


def record(tests: list[str]) -> dict[str, list[str]]:
    """Run tests and note what they answer."""
    found = {key: ["", ""] for key in questions()}
    with tempfile.TemporaryDirectory() as folder:
        notes, site = Path(folder) / "notes", str(Path(__file__).parent / "noting")
        notes.touch()
        there = {"NOTED": str(notes), "PYTHONPATH": f"{ROOT}{os.pathsep}{site}"}
        command = [sys.executable, "-m", "pytest", "-q", *tests]
        subprocess.run(command, cwd=ROOT, env={**os.environ, **there}, check=False)
        for line in notes.read_text().splitlines():
            key, answer, test = json.loads(line)
            if key in found and not found[key][not answer]:
                found[key][not answer] = test or "every start of such a machine"
    return found


def main() -> None:
    """List, or record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("tests", nargs="*", help="other tests than all")
    asked = parser.parse_args()
    if asked.record:
        found = record(asked.tests or list(TESTS))
        before = table() if asked.tests else {}
        merged = {
            key: [new or old for new, old in zip(tests, before.get(key, ["", ""]), strict=True)]
            for key, tests in found.items()
        }
        TABLE.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")
    for key, (yes, no) in sorted(table().items()):
        print(key, f"    yes  {yes or '?'}", f"    no   {no or '?'}", sep="\n")


if __name__ == "__main__":
    main()
