"""From sounds and films to logits: dataset, loader and model give what transformers' extractor and model give."""

from pathlib import Path

import pytest

from tests.distributed.conftest import run_program

pytest.importorskip("av")
pytest.importorskip("soxr")
pytest.importorskip("transformers")

pytestmark = pytest.mark.starts
FAMILIES = ("qwen2.5-omni", "qwen3-omni")


def test_logits_of_packs_with_sounds_and_films_are_transformers(tmp_path: Path) -> None:
    found = run_program("tests.unit.hf.heard", 1, str(tmp_path), *FAMILIES)
    assert set(found) == set(FAMILIES)
    assert max(found.values()) < 1e-5, found
