"""Where our code asks what machine it is on, tests have gone both ways."""

import ast
from pathlib import Path

import pytest

from tests import branches
from tests.unit.test_mutations import is_there


def test_every_question_of_the_machine_has_been_answered_both_ways() -> None:
    """A new one, or one that reads otherwise, is to be recorded (`python -m tests.branches --record TESTS`)."""
    table, known = branches.table(), set(branches.questions())
    assert known == table.keys()
    assert not [key for key, tests in table.items() if not all(tests)]


def test_the_tests_that_answer_are_there() -> None:
    named = {test for tests in branches.table().values() for test in tests if "::" in test}
    assert [test for test in named if not is_there(test)] == []


@pytest.mark.parametrize(
    ("code", "keys"),
    [
        ("def f():\n    if HAS_CUDA: pass", ["f: HAS_CUDA"]),
        ("class A:\n    def g(self):\n        return 1 if platform.HAS_APEX else 2", ["A.g: platform.HAS_APEX"]),
        ("x = a and HAS_CUDA", ["module: a and HAS_CUDA"]),
        ("x = [y for y in z if y.is_meta]", ["module: y.is_meta"]),
        ("if not (a or HAS_CUDA):\n    x = 1 if HAS_CUDA else 2", ["module: not (a or HAS_CUDA)", "module: HAS_CUDA"]),
        ("if a: pass", []),
    ],
)
def test_questions_are_found_and_noted(code: str, keys: list[str]) -> None:
    """Once each, and with the value that they have."""
    path = Path(branches.ROOT, "omnibal_ext/made_up.py")
    found: list[str] = []
    branches._Wrap(path, found).visit(ast.parse(code))
    assert [key.partition("::")[2] for key in found] == keys
    noted: list[str] = []
    scope = {"__noted__": lambda key, value: noted.append(key) or value, "HAS_CUDA": False, "a": True, "z": []}
    exec(compile(branches.noting(ast.parse(code), path), "made up", "exec"), scope)
    assert all(key in found for key in noted)
