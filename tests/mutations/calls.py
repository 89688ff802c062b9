"""Which tests run which lines: noted by `--map`, outside of the repository, or guessed by names."""

import hashlib
import json
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from faults import ROOT

MAP = Path.home() / ".cache/omnibal/lines.json"
ROOMS = ("omnibal_ext", "megatron/vlm", "tools")
MOST = 8
"""Tests that are noted of a line, and files that are guessed."""
OFTEN = 200
"""So many calls of a function are followed line by line in a test."""
QUICK = ("tests/unit", "-m", "not starts and not long")
Line = tuple[str, int]
Map = Mapping[str, Mapping[str, Sequence[str]]]
"""Tests of each line, of each file."""


class _Lines:
    """A pytest plugin that collects the lines of the product that each test runs, those of its fixtures included."""

    def __init__(self) -> None:
        self.lines, self.calls = set[Line](), Counter[CodeType]()
        self.of_fixture: dict[object, set[Line]] = {}
        self.tests: dict[Line, set[tuple[int, str]]] = defaultdict(set)
        """Of each line, the tests that run it, without parameters, behind how many lines they run."""

    def _called(self, frame: FrameType, _event: str, _value: Any) -> Any:
        code = frame.f_code
        if not code.co_flags & CO_OPTIMIZED or not code.co_filename.startswith(_PRODUCT):
            return None  # a module's or class's own lines are run by whoever imports it first
        self.lines.add((code.co_filename, frame.f_lineno))
        self.calls[code] += 1
        return self._ran if self.calls[code] <= OFTEN else None

    def _ran(self, frame: FrameType, _event: str, _value: Any) -> Any:
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._ran

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """What a fixture of several tests runs is run for each of them."""
        before, self.lines = self.lines, set()
        try:
            return (yield)
        finally:
            self.of_fixture[fixturedef] = self.lines
            self.lines = before | self.lines

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
        self.lines = set()
        self.calls.clear()
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            known = (one for name in item.fixturenames for one in item._fixtureinfo.name2fixturedefs.get(name, ()))
            lines = self.lines.union(*(self.of_fixture.get(one, ()) for one in known))
            for line in lines:
                self.tests[line].add((len(lines), item.nodeid.partition("[")[0]))


_PRODUCT = tuple(f"{ROOT / room}/" for room in ROOMS)


def write_map(tests: Sequence[str]) -> int:
    """Note of each line those tests that run the fewest others; the quick ones, for a new map, if none are named."""
    sys.path[0] = str(ROOT)
    noted = _Lines()
    code = pytest.main(["-p", "no:cacheprovider", "--rootdir", str(ROOT), *(tests or QUICK)], plugins=[noted])
    found: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for (path, number), of_line in noted.tests.items():
        first = dict.fromkeys(test for _, test in sorted(of_line))
        found[str(Path(path).relative_to(ROOT))][str(number)] = list(first)[:MOST]
    for file, lines in (read_map() if tests else {}).items():
        for line, old in lines.items():
            found[file][line] = list(dict.fromkeys([*found[file].get(line, ()), *old]))[:MOST]
    MAP.parent.mkdir(parents=True, exist_ok=True)
    MAP.write_text(json.dumps({file: {"hash": _hash(file), "lines": found[file]} for file in found}), encoding="utf-8")
    return code


def read_map() -> Map:
    """What was noted of files that have not changed since."""
    known = json.loads(MAP.read_text(encoding="utf-8")) if MAP.exists() else {}
    return {file: one["lines"] for file, one in known.items() if (ROOT / file).exists() and _hash(file) == one["hash"]}


def tests_of(file: str, lines: range, known: Map) -> tuple[str, ...]:
    """Those that run the last of the lines, or else the unit tests of the file's name, its importers', its room's."""
    noted = (known.get(file, {}).get(str(line), ()) for line in reversed(lines))
    if there := next(filter(None, (list(filter(_is_there, tests)) for tests in noted)), None):
        return tuple(there)
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


@cache
def _is_there(test: str) -> bool:
    file, *_, function = test.split("::")
    return (ROOT / file).exists() and f"def {function}(" in (ROOT / file).read_text(encoding="utf-8")


def _hash(file: str) -> str:
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()
