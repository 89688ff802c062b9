"""The page of families leaves out no model type of transformers, and knows which ones are read."""

import re
from pathlib import Path

import pytest

from omnibal_ext.families.registry import MODELS

PAGE = Path(__file__).parents[2] / "docs/families.md"


def chapters() -> dict[str, list[str]]:
    """Title of each chapter -> the model types in the first column of its tables."""
    _, *texts = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    rows = {text.partition("\n")[0]: re.findall(r"^\|([^|]+)\|", text, re.MULTILINE) for text in texts}
    return {title: [kind for row in found for kind in re.findall(r"`([^`]+)`", row)] for title, found in rows.items()}


def test_chapters_are_the_three_and_no_type_stands_in_two_places() -> None:
    found = chapters()
    assert list(found) == ["Has", "Near", "Far"]
    types = [kind for chapter in found.values() for kind in chapter]
    assert sorted(types) == sorted(set(types))


def test_those_we_have_are_those_we_read() -> None:
    assert set(chapters()["Has"]) == set(MODELS)


def test_no_type_of_transformers_is_left_out() -> None:
    modeling = pytest.importorskip("transformers.models.auto.modeling_auto")
    types = {kind for chapter in chapters().values() for kind in chapter}
    assert set(modeling.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - types == set()


def test_every_row_says_what_is_missing() -> None:
    text = PAGE.read_text().partition("## Near")[2]
    rows = [row for row in text.splitlines() if row.startswith("| `")]
    assert rows
    assert all(re.fullmatch(r"\| `[^|]+\| [^|]+ \| [^|]{8,} \|", row) for row in rows)
