"""The examples train where the GPUs are: a card a rank, NCCL, products in bf16; with the losses of the CPU."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.long import short
from tests.programs import CARDS, ROOT, run_ranks, tool
from tests.system.families import build
from tools.__main__ import COMMANDS

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.starts
RANKS, STEPS = 2, 2
NUMBERS = {"8": str(RANKS), "16384": "512"}
"""What a document says, and what small cards of a test take."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user has: conversations, images, a model whose weights are stored in bf16."""
    demo, folder = tmp_path_factory.mktemp("demo"), tmp_path_factory.mktemp("user")
    tool("make_demo_data.py", "--output-dir", demo, "--samples", 24, "--heldout-samples", 4)
    build("internvl3.5", demo, folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder / "model")
    model.bfloat16().save_pretrained(folder / "model")
    for name, same in (("HF_FOLDER", "model"), ("images", "demo"), ("chat.jsonl", "demo/train.jsonl")):
        (folder / name).symlink_to(same)
    return folder


@pytest.fixture(scope="module")
def training(folder: Path) -> list[str]:
    """The words of the page's first training, after `torchrun` and its own; what comes before it is done."""
    block = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/loops.md").read_text(), re.DOTALL)[0]
    named = {name: str(folder / name) for name in ("HF_FOLDER", "chat.jsonl", "images", "data", "packs")} | NUMBERS
    *before, last = [[named.get(word, word) for word in shlex.split(line)] for line in block.strip().splitlines()]
    for _, program, *words in before:
        tool(COMMANDS[program].file, *words)
    assert last[:3] == ["torchrun", "--nproc-per-node", str(RANKS)]
    return [*last[3:], "--steps", str(STEPS)]


def computed(said: str) -> list[dict[str, list[str]]]:
    """What `tests/cards/example.py` saw, of each rank."""
    return [json.loads(line.removeprefix("COMPUTED ")) for line in said.splitlines() if line.startswith("COMPUTED ")]


def losses(said: str) -> list[float]:
    lines = re.findall(r"^[\w ]+: loss(?:es)? (.*)$", said, re.MULTILINE)
    return [float(number) for line in lines for number in re.findall(r"\d+\.\d{4,}", line)]


def check(name: str, words: list[str], stored: list[str]) -> None:
    here = losses(run_ranks("tests.system.example", RANKS, [name, *words]))
    said = run_ranks("cards.run", RANKS, ["cards.example", name, *words], server=CARDS)
    assert len(here) >= STEPS
    assert losses(said) == pytest.approx(here, rel=1e-3)
    for rank, seen in enumerate(sorted(computed(said), key=lambda seen: seen["backend"])):
        card = f"cuda:{rank}"
        assert seen == {"backend": ["nccl", card], "weights": [card], "inputs": [card], "stored": stored,
                        "outputs": ["torch.bfloat16"]}  # fmt: skip


def test_the_first_training_of_the_page_on_loops_is_on_the_gpus(training: list[str]) -> None:
    """Weights that are trained are in fp32 however they were stored: a step of 1e-5 rounds to none in bf16."""
    program, *words = training
    check(Path(program).name, words, ["torch.float32"])


@pytest.mark.parametrize(
    "name", short(["train_accelerate.py", "train_trainer.py", "train_stream.py"], ["train_trainer.py"])
)
def test_the_others_too(name: str, training: list[str]) -> None:
    """Beside adapters, which are trained, the rest stays as it was stored."""
    more = ["--lora", "4"] if name == "train_trainer.py" else []
    stored = ["torch.bfloat16", "torch.float32"] if more else ["torch.float32"]
    if name != "train_stream.py":
        pytest.importorskip("accelerate")
    if more:
        pytest.importorskip("peft")
    words = training[1:]
    if name == "train_stream.py":
        at = words.index("--packs")
        words = words[:at] + words[at + 2 :]
    check(name, [*words, *more], stored)
