"""Demo data: every answer is one token a letter and a digit, and held-out digits are never trained on."""

import string
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from PIL import Image

from examples.demo.data import LETTERS, make_demo_data, train_tokenizer
from omnibal_ext.errors import UserError
from tools import make_demo_data as by_its_name


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    make_demo_data(folder, samples=800, heldout_samples=60, seed=3)
    return folder


def shown_digits(folder: Path, name: str) -> set[bytes]:
    """The 8 x 8 pictures of all cells of all pictures of a split."""
    found = set()
    for path in sorted((folder / "images").glob(f"{name}-*.png")):
        pixels = np.asarray(Image.open(path))
        cells = pixels.reshape(pixels.shape[0] // 32, 32, -1, 32).swapaxes(1, 2).reshape(-1, 32, 32)
        found |= {cell[8::3, 8::3].tobytes() for cell in cells}
    return found


def test_every_letter_digit_and_special_token_is_one_token_everywhere() -> None:
    model = sentencepiece.SentencePieceProcessor(model_proto=train_tokenizer())
    for symbol in [*LETTERS, *string.digits, "<img>", "</img>", "<IMG_CONTEXT>", "<|im_start|>", "<|im_end|>", "\n"]:
        assert len(model.encode(symbol)) == 1
        assert model.unk_id() not in model.encode(symbol)
    assert model.encode("Spell: a5b3\n")[-5:] == [model.encode(symbol)[0] for symbol in "a5b3\n"]


def test_held_out_pictures_show_no_digit_of_training(demo: Path) -> None:
    train, heldout = shown_digits(demo, "train"), shown_digits(demo, "heldout")
    assert len(train) > 500
    assert len(heldout) > 30
    assert not train & heldout


def test_one_seed_gives_one_result(demo: Path, tmp_path: Path) -> None:
    make_demo_data(tmp_path, samples=800, heldout_samples=60, seed=3)
    for path in demo.rglob("*.*"):
        assert path.read_bytes() == (tmp_path / path.relative_to(demo)).read_bytes()


def test_an_installed_package_says_where_the_demo_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_its_name, "PROGRAM", tmp_path / "examples/demo/data.py")
    with pytest.raises(UserError, match=r"examples/demo/data\.py: is not there; take a copy of the repository"):
        by_its_name.main()
