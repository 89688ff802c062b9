"""Demo data: pictures of handwritten digits to be read, as chat JSONL and PNG, and a tokenizer for them.

    python tools/make_demo_data.py --output-dir demo [--samples 1600]

A picture is a grid of cells, and a cell is exactly one tile of the tiny preset (32 x 32 pixels): a handwritten digit
(scikit-learn's 8 x 8 pixels, three times as large) and, in the border above it, a letter that names the cell.

    +----------+----------+
    | a        | b        |      human:  <image>
    |    77    |    00    |              Read the digits.
    |     7    |    00    |      gpt:    a7b0
    +----------+----------+

Pictures of 1 to 30 cells with many small and few large ones, several images in some conversations (the letters go on)
and conversations without any make tiles and tokens as uneven as they are in instruction tuning. Pictures that are held
out show digits that no training picture shows.
"""

import argparse
import io
import json
import string
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import exit_on_user_error, run_tool
from omnibal_ext.families.markup import IMAGE_MARK
from omnibal_ext.flags import Interval, ToolParser

with exit_on_user_error():
    import sentencepiece
    from PIL import Image, ImageDraw, ImageFont

    from omnibal_ext.families.internvl.tiling import internvl_grid
    from omnibal_ext.families.registry import MARKUPS
    from omnibal_ext.modalities.vision.tiling import Grid

NUMBERS = (Interval("[1, 1e9]", "samples heldout_samples"), Interval("[0, 4294967295]", "seed"))
TILE = 32  # pixels a side of a cell, a tile of the tiny preset
MAX_TILES = 32  # what the demo is preprocessed with
MAX_DIGITS = 30  # in one picture
MAX_SIDE = 10  # cells in a row or column
LETTERS = string.ascii_letters
QUESTION = "Read the digits."
SPELLING = "Spell"
OTHER_TOKENS = (
    "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<bos>",
    "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "<end_of_utterance>", "<eos>",
)  # fmt: skip
"""Special tokens of other chat templates than InternVL's."""
TEXT_ONLY_SHARE, SEVERAL_IMAGES_SHARE = 0.2, 0.15
HELD_OUT_DIGITS = 0.2  # share of the handwritten digits kept for the held-out pictures


@dataclass(frozen=True, slots=True)
class Digits:
    """Handwritten digits: pictures uint8 [N, 8, 8] (0 to 255) and what they show, int64 [N]."""

    pictures: NDArray[np.uint8]
    values: NDArray[np.int64]

    def take(self, which: NDArray[np.int64]) -> "Digits":
        """Those digits alone."""
        return Digits(self.pictures[which], self.values[which])


def load_digits() -> Digits:
    """The 1,797 digits that scikit-learn ships (UCI, Optical Recognition of Handwritten Digits)."""
    from sklearn.datasets import load_digits as load

    bunch = load()
    return Digits((bunch.images * (255 / 16)).astype(np.uint8), bunch.target)


@cache
def exact_grids(max_tiles: int) -> dict[int, list[Grid]]:
    """Area -> grids of at most `max_tiles` cells that dynamic tiling cuts back into exactly these cells.

    Not all are: a picture of 3 x 3 cells has more than half the pixels of 4 x 4, and its rule prefers the larger grid.
    """
    grids: dict[int, list[Grid]] = {}
    for columns in range(1, MAX_SIDE + 1):
        for rows in range(1, MAX_SIDE + 1):
            area = columns * rows
            fits = area <= min(max_tiles, MAX_DIGITS)
            if fits and internvl_grid(columns * TILE, rows * TILE, TILE, 1, max_tiles) == (columns, rows):
                grids.setdefault(area, []).append((columns, rows))
    return grids


@cache
def label_picture(letter: str) -> NDArray[np.uint8]:
    """A letter of the default font, 8 x 8 pixels: uint8 [8, 8]."""
    picture = Image.new("L", (8, 8))
    ImageDraw.Draw(picture).text((4, 4), letter, fill=255, font=ImageFont.load_default(size=9), anchor="mm")
    return np.asarray(picture)


def draw_picture(grid: Grid, letters: str, pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Cells in reading order: uint8 [rows * TILE, columns * TILE]. `pictures` are the digits, uint8 [cells, 8, 8]."""
    columns, rows = grid
    cells = np.zeros((rows * columns, TILE, TILE), dtype=np.uint8)
    cells[:, 8:, 8:] = pictures.repeat(3, axis=1).repeat(3, axis=2)
    cells[:, :8, :8] = np.stack([label_picture(letter) for letter in letters])
    return cells.reshape(rows, columns, TILE, TILE).swapaxes(1, 2).reshape(rows * TILE, columns * TILE)


class DemoWriter:
    """Draws conversations from one generator and writes their pictures under `folder/images`."""

    def __init__(self, folder: Path, digits: Digits, generator: np.random.Generator) -> None:
        self._folder, self._digits, self._generator = folder, digits, generator

    def write(self, name: str, samples: int) -> None:
        """Write `name.jsonl` and its pictures."""
        rows = [self._conversation(f"{name}-{number:05d}") for number in range(samples)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (self._folder / f"{name}.jsonl").write_text(text, encoding="utf-8")

    def _conversation(self, name: str) -> dict[str, Any]:
        kind = self._generator.random()
        if kind < TEXT_ONLY_SHARE:
            return {"id": name, "conversations": self._spelling()}
        images = int(self._generator.integers(2, 5)) if kind < TEXT_ONLY_SHARE + SEVERAL_IMAGES_SHARE else 1
        grids = [self._draw_grid(MAX_TILES // images) for _ in range(images)]
        answers = self._draw_pictures(name, grids)
        paths = [f"images/{name}-{number}.png" for number in range(images)]
        if self._generator.random() < 0.5:  # all images in one question
            turns = _turns((f"{IMAGE_MARK}\n" * images + QUESTION, "".join(answers)))
        else:  # one question an image
            turns = _turns(*((f"{IMAGE_MARK}\n{QUESTION}", answer) for answer in answers))
        return {"id": name, "image": paths[0] if images == 1 else paths, "conversations": turns}

    def _draw_pictures(self, name: str, grids: Sequence[Grid]) -> list[str]:
        """Write one picture a grid and return what each says; the letters go on from picture to picture."""
        counts = [columns * rows for columns, rows in grids]
        letters, answers, first = LETTERS[: sum(counts)], [], 0
        for number, (grid, count) in enumerate(zip(grids, counts, strict=True)):
            shown = self._digits.take(self._generator.integers(len(self._digits.values), size=count))
            named = letters[first : first + count]
            picture = Image.fromarray(draw_picture(grid, named, shown.pictures))
            picture.save(self._folder / "images" / f"{name}-{number}.png")
            answers.append(_pairs(named, shown.values))
            first += count
        return answers

    def _draw_grid(self, max_tiles: int) -> Grid:
        grids = exact_grids(max_tiles)
        candidates = grids[self._heavy_tailed(sorted(grids), power=3.0)]
        return candidates[self._generator.integers(len(candidates))]

    def _heavy_tailed(self, values: Sequence[int], power: float) -> int:
        weights = np.array(values, dtype=np.float64) ** -power
        return int(self._generator.choice(values, p=weights / weights.sum()))

    def _spelling(self) -> list[dict[str, str]]:
        count = self._heavy_tailed(range(2, len(LETTERS) + 1), power=0.5)
        first = self._generator.integers(len(LETTERS) - count + 1)
        letters = LETTERS[first : first + count]
        return _turns((f"{SPELLING}: {letters[0]} {letters[-1]}", letters))


def _pairs(letters: str, values: NDArray[np.int64]) -> str:
    return "".join(f"{letter}{value}" for letter, value in zip(letters, values, strict=True))


def _turns(*exchanges: tuple[str, str]) -> list[dict[str, str]]:
    return [
        {"from": speaker, "value": words}
        for exchange in exchanges
        for speaker, words in zip(("human", "gpt"), exchange, strict=True)
    ]


def train_tokenizer() -> bytes:
    """A sentencepiece model in which every letter and digit of an answer is exactly one token, always the same."""
    special = ("<|im_start|>", "<|im_end|>", *MARKUPS["internvl"].tokens, *OTHER_TOKENS)
    words = ["\n", "user", "assistant", "system", "Read", "▁the", "▁digits", SPELLING]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([QUESTION, f"{SPELLING}: {LETTERS}{string.digits}"]),
        model_writer=model,
        model_type="char",
        vocab_size=256,
        hard_vocab_limit=False,
        user_defined_symbols=[*special, *words],
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def make_demo_data(folder: Path, samples: int, heldout_samples: int, seed: int) -> None:
    """Write train.jsonl, heldout.jsonl, images/*.png and tokenizer.model. One seed, one result."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    digits = load_digits()
    order = generator.permutation(len(digits.values))
    kept = round(len(order) * HELD_OUT_DIGITS)
    DemoWriter(folder, digits.take(order[kept:]), generator).write("train", samples)
    DemoWriter(folder, digits.take(order[:kept]), generator).write("heldout", heldout_samples)
    (folder / "tokenizer.model").write_bytes(train_tokenizer())


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = ToolParser(numbers=NUMBERS, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=1600, help="training conversations (default %(default)s)")
    parser.add_argument("--heldout-samples", type=int, default=100, help="of digits never trained on (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args()


def main() -> None:
    """Run the tool."""
    arguments = parse_arguments()
    started = time.perf_counter()
    make_demo_data(arguments.output_dir, arguments.samples, arguments.heldout_samples, arguments.seed)
    seconds = round(time.perf_counter() - started, 3)
    counts = {"samples": arguments.samples, "heldout_samples": arguments.heldout_samples}
    if arguments.json:
        print_json({"output_dir": str(arguments.output_dir), **counts, "seconds": seconds})
    else:
        print_table(f"Demo data {arguments.output_dir}", ("", "count"), list(counts.items()))


if __name__ == "__main__":
    run_tool(main)
