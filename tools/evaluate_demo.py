"""How many digits of the held-out pictures a trained model reads back right.

python tools/evaluate_demo.py --model tiny --load RUN/checkpoints --data HELDOUT --tokenizer-model T
"""

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import pairwise

from omnibal_ext.architectures.presets import MODEL_FLAGS
from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.flags import ToolParser


def main() -> None:
    """Load the checkpoint on this process, let the model answer, compare digit by digit."""
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(*MODEL_FLAGS, required=True)
    parser.add_argument("--load", required=True, help="checkpoint folder, of any layout")
    parser.add_argument("--data", required=True, help="held-out dataset folder")
    parser.add_argument("--tokenizer-model", required=True, help="the demo's tokenizer")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    import sentencepiece

    from megatron.vlm.generate import generated_answers

    answers = generated_answers(arguments.model, arguments.load, arguments.data)
    decode = sentencepiece.SentencePieceProcessor(model_file=arguments.tokenizer_model).decode
    pairs = [(_digits(decode(a.expected)), _digits(decode(a.generated))) for a in answers]
    counts = [(len(asked), sum(read.get(cell) == digit for cell, digit in asked.items())) for asked, read in pairs]
    digits, right = map(sum, zip(*counts, strict=True)) if counts else (0, 0)
    if digits == 0:
        raise UserError(f"{arguments.data}: no answer names a digit; is this the demo's held-out data?")
    result = {"pictures_asked": len(pairs), "digits": digits, "digits_right": right, **share_right(counts)}
    if arguments.json:
        print_json(result)
    else:
        print_table(f"Digits read back from {arguments.data}", ("measure", "value"), list(result.items()))


def share_right(counts: Sequence[tuple[int, int]]) -> dict[str, float]:
    """The share of digits read right, and its standard error; (digits, right) of every answer.

    Answers are drawn independently, the digits of one are not: sqrt(sum((right - share digits)^2)) / all digits.
    """
    digits, right = (sum(column) for column in zip(*counts, strict=True))
    share = right / digits
    error = math.sqrt(sum((found - share * asked) ** 2 for asked, found in counts)) / digits
    return {"share_right": share, "standard_error": error}


def _digits(answer: str) -> dict[str, str]:
    """What an answer like "a5b3" says of each cell: {"a": "5", "b": "3"}."""
    return {cell: digit for cell, digit in pairwise(answer) if cell.isalpha() and digit.isdigit()}


if __name__ == "__main__":
    sys.argv[0] = "evaluate_demo"
    run_tool(main)
