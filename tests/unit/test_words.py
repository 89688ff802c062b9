"""Words that strangers misread stay out of code and documents; docstrings say what is done, or what a value is."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFUSED = {
    "kin": "width class, exchange group", "mishaps?": "bad sample, skipped step", "seat": "slot",
    "lifeline": "parent watch", "meeting": "head exchange", "soundly": "finite", "mend(ed|s|ing)?": "fix",
    "levelled": "rebalanced", "aside": "leftover, superseded", "dealt": "distributed, assigned",
    "roads?": "tower layout",
}  # fmt: skip
FORMATS = re.compile(r"levelled-[{\d]|\.aside\b|\[['\"]road['\"]\]|\"road\":")
"""Names of files, and keys of plan.json, that older versions wrote too."""
UNTOLD = ("omnibal_ext/launch/", "tools/launch.py")
"""Code whose docstrings do not have the form yet."""
CHAIN = ("megatron/vlm/models", "megatron/vlm/pipeline", "megatron/vlm/profiling", "megatron/vlm/hf")
OTHER_NAMES = {"again": "recompute, recomputed", "link": "layer", "links": "layers"}
NETWORK = ("analytic.py", "state.py", "action_costs.py")
"""Modules in which a link is one of a network."""
VERBS = re.findall(
    r"\w+",
    """
    Accept Add Append Apply Assemble Assign Attach Attend Average Balance Begin Bring Broadcast Build Call Cap
    Check Choose Clamp Clip Close Compare Compile Complete Compute Concatenate Continue Convert Copy Count
    Create Cut Decode Delete Discard Divide Do Draw Drop Empty Encode End Equalize Estimate Evaluate Exchange
    Exclude Export Fill Find Finish Fit Free Gather Give Group Hash Have Hide Hold Insert Install Interpolate
    Iterate Join Judge Keep Leave Let Limit List Load Lock Make Map Mark Measure Merge Move Multiply Name
    Normalise Note Open Order Overwrite Pack Pad Pair Parse Pass Pickle Place Plan Play Prepare Print Project
    Put Raise Read Recompute Record Reduce Refuse Regroup Remove Rename Render Reorder Repeat Replace Reshape
    Resize Resolve Restore Return Rotate Round Run Sample Save Say Scale Search Seed Segment Send Set Show
    Shuffle Simulate Skip Solve Sort Split Spread Stack Start Subtract Sum Swap Switch Take Target Train Try
    Turn Validate Wait Walk Warn Watch Wrap Write Yield
    """,
)
"""First words of functions: what is done, in the imperative."""
LEANING = re.findall(
    r"\w+",
    """
    Added Also And As At Between By For From If In It Its Like Likewise Not Of On Or So Such That Their
    These Those To Where With Without
    """,
)
"""First words that lean on something said elsewhere: no value begins with one."""


def files() -> list[Path]:
    code = [path for package in ("omnibal_ext", "megatron", "tools") for path in (ROOT / package).rglob("*.py")]
    return [*code, *ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def test_private_words_stay_out() -> None:
    private = re.compile(rf"(?<![a-z-])({'|'.join(REFUSED)})(?![a-z-])", re.IGNORECASE)
    found = []
    for path in files():
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in private.finditer(FORMATS.sub("", line)):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[1]!r}")
    assert not found, f"write instead, by the word: {REFUSED}"


def test_one_thing_has_one_name() -> None:
    """An element of the chain is a layer, and what runs twice is recomputed; `stage.links` is in checkpoints' names."""
    found = []
    for room in ("omnibal_ext/layout", "omnibal_ext/costs", "omnibal_ext/schedules", *CHAIN):
        for path in (ROOT / room).rglob("*.py"):
            names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
            found += [
                f"{path.relative_to(ROOT)}: {name}" for name in names & OTHER_NAMES.keys() if path.name not in NETWORK
            ]
    assert not found, f"write instead, by the name: {OTHER_NAMES}"


def docstrings(module: ast.Module) -> Iterator[tuple[int, bool, str]]:
    """Line, whether it is a function's (not a property's), and text of every docstring, those behind fields too."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        if text := ast.get_docstring(node):
            marks = getattr(node, "decorator_list", ())
            acts = isinstance(node, ast.FunctionDef) and not any("property" in ast.unparse(one) for one in marks)
            yield node.body[0].lineno, acts, text
        for field, said in pairwise(node.body):
            if isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(said, ast.Expr):
                yield said.lineno, False, str(getattr(said.value, "value", "Call"))


def first_word(text: str) -> str:
    """Without the shape that may stand in front."""
    return re.split(r"[^A-Za-z]", re.sub(r"^\[[^]]*\] ", "", text.strip()), maxsplit=1)[0]


@pytest.mark.parametrize("package", ["omnibal_ext", "megatron", "tools"])
def test_a_function_says_what_it_does_and_a_value_what_it_is(package: str) -> None:
    """Functions, private ones too, begin with a verb; what is a value leans on nothing that is said elsewhere."""
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for line, acts, text in () if name.startswith(UNTOLD) else docstrings(ast.parse(path.read_text())):
            word = first_word(text)
            if (word not in VERBS) if acts else (word in LEANING):
                found.append(f"{name}:{line}: {text.splitlines()[0]}")
    assert not found, "begin with a verb in the imperative (VERBS); values with a noun, or a word that stands alone"
