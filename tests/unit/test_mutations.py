"""The faults on file fit the code as it is: one that fits no more is seen by no test, and nobody would know."""

import ast
import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.programs import ROOT

FOLDER = ROOT / "tests/mutations"
RECORDS = [json.loads(line) for line in (FOLDER / "faults.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def mutator(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("mutator")


def test_the_old_text_of_each_stands_once_in_its_file() -> None:
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in {one["file"] for one in RECORDS}}
    stale = [one["name"] for one in RECORDS if texts[one["file"]].count(one["old"]) != 1 or one["old"] == one["new"]]
    assert not stale, "edit their lines in tests/mutations/faults.jsonl"


def is_there(test: str) -> bool:
    """Whether there is a test of this name, or a file of tests."""
    path, _, name = test.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
    return f"def {name.partition('[')[0]}(" in text if name else bool(text)


def test_each_names_tests_that_there_are() -> None:
    assert not [one["name"] for one in RECORDS if not one["test"] or not all(map(is_there, one["test"]))]


def test_they_are_many_in_the_order_of_their_names_and_each_says_what_is_wrong() -> None:
    names = [one["name"] for one in RECORDS]
    assert names == sorted(set(names))
    assert len(names) >= 200
    assert all(one["fault"].endswith(".") and one.keys() == RECORDS[0].keys() for one in RECORDS)


def test_random_faults_are_of_every_kind_and_python(mutator: ModuleType) -> None:
    source = '''
class Any:
    @property
    def of(self, count: int = 7) -> int:
        """äöü"""
        if not self.ready and count < 3:
            go("ä", count)
        left = count + 2
        return left.go(left, left)
'''
    found = [fault for fault, lines in mutator.faults_of("any.py", source) if lines[0] == 3]
    assert {(one.old, one.new) for one in found} == {
        ("not self.ready and count < 3", "(not self.ready or count < 3)"), ("not self.ready", "self.ready"),
        ("count < 3", "(count <= 3)"), ("3", "4"), ('go("ä", count)', "pass"), ('go("ä", count)', "go(count, 'ä')"),
        ("left = count + 2", "return"), ("count + 2", "(count - 2)"), ("2", "3"),
    }  # fmt: skip
    for one in found:
        assert source[one.at :].startswith(one.old)
        ast.parse(one.plant(source))


def test_tests_of_a_module_are_those_of_its_name_and_of_its_importers(mutator: ModuleType) -> None:
    tests = mutator.calls.tests_of("omnibal_ext/schedules/placement.py", range(1, 2), {})
    assert tests[0] == "tests/unit/schedules/test_placement.py"
    assert all(Path(ROOT, test).is_file() for test in tests)


def test_tests_of_a_line_are_those_that_run_it_or_the_last_noted_before_it_and_are_still_there(
    mutator: ModuleType,
) -> None:
    here = "tests/unit/test_mutations.py::test_each_names_tests_that_there_are"
    known = {"a.py": {"8": ["gone.py::test_it", here], "7": [f"{here}_no_more"], "9": ["gone.py::test_it"]}}
    for lines in (range(5, 9), range(8, 12)):
        assert mutator.calls.tests_of("a.py", lines, known) == (here,)
    assert not any("::" in test for test in mutator.calls.tests_of("a.py", range(5, 8), known))
