"""docs/coming-from.md: commands that people have published, translated by its tables, and its lines of defaults.

Each flag of theirs stands in their trainer's section of the page, and what is made of it passes `--check`.
"""

import json
import re
from pathlib import Path

import pytest

from tests.programs import ROOT, tool
from tests.system.families import save_model

PAGE = (ROOT / "docs/coming-from.md").read_text()
SECTIONS = dict(part.split("\n", 1) for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:])
PUBLISHED = json.loads(Path(__file__).with_name("published_commands.json").read_text())
"""Commands, as of 2026: their trainer's section of the page, their flags, the family, what the page makes of them; and
flags of theirs that need no word: paths, names, logging, and what a trainer is started with."""
COMMANDS = PUBLISHED["commands"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    tool("make_demo_data.py", "--output-dir", folder, "--samples", 24, "--heldout-samples", 4)
    return folder


def checked(demo: Path, family: str, run: Path, words: str) -> str:
    """What `--check` says of a run of a small model of the family on two ranks."""
    model = demo / family
    if not model.exists():
        save_model(family, model, demo / "tokenizer.model")
    made = ("--model", model, "--from-scratch", "--input", demo / "train.jsonl", "--run-dir", run)
    return tool("launch.py", *made, "--analytic", "h100", "--nproc-per-node", 2, "--check", *words.split()).stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_of_published_commands_are_on_the_page_and_what_is_made_of_them_passes(
    demo: Path, tmp_path: Path, name: str
) -> None:
    command = COMMANDS[name]
    flags = re.findall(
        r"(?:^|\s)(?:--)?([A-Za-z_]{2,})(?==|\s|$)", re.sub(r"(--\w+) [^\s-]\S*", r"\1", command["theirs"])
    )
    rows = "".join(row for row in SECTIONS[command["section"]].splitlines() if row.startswith("| "))
    known = set(re.findall(r"[A-Za-z_0-9]+", " ".join(re.findall(r"`([^`]+)`", rows))))
    assert sorted({*flags} - known - {*PUBLISHED["needs no word"]}) == []
    assert "refused" not in checked(demo, command["family"], tmp_path, command["ours"])


DEFAULTS = re.findall(r"^(--.*)   # (.*)$", PAGE, re.MULTILINE)
FREEZES = {"ms-swift": True, "LLaMA-Factory": True, "InternVL": False, "Megatron-Bridge": False}
"""Whether a trainer freezes ViT and projector unless it is told otherwise."""


def test_every_trainers_defaults_are_flags_of_ours(demo: Path, tmp_path: Path) -> None:
    assert len(DEFAULTS) == 7
    for number, (words, whose) in enumerate(DEFAULTS):
        frozen = FREEZES[re.split(r"[, ]", whose)[0]]
        assert ("--lora-rank" in words) == ("LoRA" in whose)
        assert ("--freeze vit projector" in words) == (frozen and "LoRA" not in whose)
        said = checked(demo, "qwen2.5-vl", tmp_path / str(number), words)
        assert "refused" not in said
