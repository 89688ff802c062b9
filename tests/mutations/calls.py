"""Which tests call which functions: noted by `--map`, outside of the repository, or guessed by names."""

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from faults import ROOT

MAP = Path.home() / ".cache/omnibal/calls.json"
MOST = 8
"""Tests that are noted of a function, and files that are guessed."""
QUICK = ("tests/unit", "-m", "not starts and not long")


class _Calls:
    """A pytest plugin that collects code called by each test."""

    def __init__(self) -> None:
        self.codes = set[CodeType]()
        self.tests: dict[str, set[tuple[str, int]]] = {}
        """The file and first line of the functions of ours that each has called."""

    def _called(self, frame: FrameType, _event: str, _value: Any) -> None:
        self.codes.add(frame.f_code)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.codes.clear()
        sys.settrace(self._called)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            ours = (code for code in self.codes if code.co_filename.startswith(f"{ROOT}/"))
            self.tests[item.nodeid] = {(str(Path(c.co_filename).relative_to(ROOT)), c.co_firstlineno) for c in ours}


def write_map(tests: Sequence[str]) -> int:
    """Run tests, the quick ones if none are named, and note of each function those that call the fewest others."""
    sys.path[0] = str(ROOT)
    noted = _Calls()
    code = pytest.main(["-p", "no:cacheprovider", "--rootdir", str(ROOT), *(tests or QUICK)], plugins=[noted])
    found: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for test in sorted(noted.tests, key=lambda test: len(noted.tests[test])):
        for file, line in noted.tests[test]:
            if len(found[file][line]) < MOST:
                found[file][line].append(test)
    MAP.parent.mkdir(parents=True, exist_ok=True)
    MAP.write_text(
        json.dumps({file: {"hash": _hash(file), "functions": found[file]} for file in found}), encoding="utf-8"
    )
    return code


def read_map() -> Mapping[str, Any]:
    """What was noted of files that have not changed since."""
    known = json.loads(MAP.read_text(encoding="utf-8")) if MAP.exists() else {}
    return {
        file: one["functions"] for file, one in known.items() if (ROOT / file).exists() and _hash(file) == one["hash"]
    }


def tests_of(file: str, line: int, known: Mapping[str, Any]) -> tuple[str, ...]:
    """Of the function that begins at a line, or else the unit tests of the file's name, its importers', its room's."""
    if noted := known.get(file, {}).get(str(line)):
        return tuple(noted)
    path = Path(file)
    module = ".".join(path.with_suffix("").parts)
    parts = [part for part in path.parts[:-1] if part not in ("omnibal_ext", "megatron", "vlm")]
    files = sorted((ROOT / "tests/unit").rglob("test_*.py"))
    named = [one for one in files if one.name == f"test_{path.stem}.py"]
    importing = [
        one
        for one in files
        if f"{module} import" in (text := one.read_text(encoding="utf-8")) or f'"{path.name}"' in text
    ]
    room = [one for one in files if parts and one.parent.name == parts[0]]
    return tuple(str(one.relative_to(ROOT)) for one in dict.fromkeys([*named, *importing, *room]))[:MOST] or (
        "tests/unit",
    )


def _hash(file: str) -> str:
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()
