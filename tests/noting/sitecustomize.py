"""Python imports this when it starts with this folder on its path: our code then notes how its questions are answered.

NOTED is the file that every answer is written to once a process: question, answer, and the test that ran.
"""

import ast
import builtins
import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

_path = Path(__file__).parents[1] / "branches.py"
_spec = importlib.util.spec_from_file_location("branches_of_tests", _path)
assert _spec
assert _spec.loader
branches = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = branches
_spec.loader.exec_module(branches)
_known: set[tuple[str, bool]] = set()


def note(key: str, value: Any) -> Any:
    answer = bool(value)
    if (key, answer) not in _known:
        _known.add((key, answer))
        line = json.dumps([key, answer, os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]])
        with Path(os.environ["NOTED"]).open("a") as notes:
            notes.write(line + "\n")
    return value


class _Noting(SourceFileLoader):
    def path_stats(self, path: str) -> Any:
        raise OSError("what is compiled does not note")

    def source_to_code(self, data: Any, path: Any, *_: Any, **__: Any) -> CodeType:  # type: ignore[override]
        return compile(branches.noting(ast.parse(data), Path(path)), path, "exec")


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in ("megatron", "omnibal_ext", "benchmarks", "tools", "omnibal_tools"):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin and branches.is_ours(Path(spec.origin)):
            spec.loader = _Noting(name, spec.origin)
        return spec


if "NOTED" in os.environ:
    builtins.__noted__ = note  # type: ignore[attr-defined]
    sys.meta_path.insert(0, _Finder)
