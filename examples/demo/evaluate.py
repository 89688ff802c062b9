"""How many digits of the held-out pictures a trained model reads back right, greedily: the whole chain on one process.

python examples/demo/evaluate.py --model tiny --load RUN/checkpoints --data HELDOUT --tokenizer-model T
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from torch import Tensor

from megatron.vlm.data.inputs.images import pixels_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron.vlm.checkpoint.folder import Checkpoints
from megatron.vlm.checkpoint.guard import load_complete
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.inputs.images import order_tensors
from megatron.vlm.media import Images, together
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.single import single_process
from omnibal_ext.adapters import Adapters
from omnibal_ext.architectures.presets import MODEL_FLAGS
from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.flags import ToolParser
from omnibal_ext.modalities.modality import VISION
from omnibal_ext.modalities.vision.features import FeatureOrder


def main() -> None:
    """Load the checkpoint on this process, let the model answer, compare digit by digit."""
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(*MODEL_FLAGS, required=True)
    parser.add_argument("--load", required=True, help="checkpoint folder, of any layout")
    parser.add_argument("--data", required=True, help="held-out dataset folder")
    parser.add_argument("--tokenizer-model", required=True, help="the demo's tokenizer")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

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


@dataclass
class Answer:
    """One answer to be given: what comes before it, what was expected, and what the model says."""

    sample: int
    prompt: list[int]
    expected: list[int]
    generated: list[int] = field(default_factory=list)


def generated_answers(preset: str, load: str, folder: str) -> list[Answer]:
    """The answers that a checkpoint (of any layout) gives to the pictures of a dataset folder; one process.

    Raises UserError if the checkpoint or the dataset is not there, or torchrun has started several processes.
    """
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(
            f"answers are given on one process, and torchrun has started {ranks}: start it without torchrun"
        )
    run = Checkpoints(Path(load)).newest().integrity["run"]
    flags = [
        "--load",
        load,
        "--no-load-optim",
        "--no-load-rng",
        "--ckpt-format",
        "torch_dist",
        "--exit-on-missing-checkpoint",
        *Adapters.from_record(run.get("adapters")).flags,
    ]
    with single_process(preset, flags) as inputs:
        data = ChatDataset(folder)
        if data.rule.native:
            raise UserError(f"{folder}: images are at native resolution, for which nothing is generated here")
        chain = Chain.of(inputs.args, inputs.architecture)
        stages = split_chain(chain)
        load_complete(stages, None, None)
        with_images = np.flatnonzero(data.sizes.tiles).tolist()
        answers = [answer for sample in with_images for answer in answers_of(data, sample)]
        generate(stages, data, answers)
    return answers


def split_chain(chain: Chain) -> list[Stage]:
    """The chain as two stages on this process's device: the ViT up to the projector, and the language model."""
    middle = chain.kinds.index("word_embed")
    stages = Stage(chain, 0, middle, vp_stage=0), Stage(chain, middle, len(chain.kinds), vp_stage=1)
    return [stage.cuda() for stage in stages]


def answers_of(data: ChatDataset, sample: int) -> list[Answer]:
    """The answers of one conversation: every run of supervised tokens, after the true words before it."""
    text, mask = data.sample(sample).text
    tokens = text.tolist()
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [Answer(sample, tokens[:start], tokens[start:end]) for start, end in edges.reshape(-1, 2).tolist()]


@torch.no_grad()
def generate(stages: Sequence[Stage], data: ChatDataset, answers: Sequence[Answer]) -> None:
    """Let the model give every answer, greedily, as far as the expected one is long; fills `generated`."""
    vision, language = (stage.eval() for stage in stages)
    images = [_image_tokens(vision, data, answer) for answer in answers]
    while open_answers := [n for n, answer in enumerate(answers) if not _finished(answer)]:
        packed = [answers[number] for number in open_answers]
        language.set_input_tensor(torch.cat([images[number] for number in open_answers]))
        logits = language(_pack(data, packed))
        ends = torch.tensor([len(answer.prompt) + len(answer.generated) for answer in packed]).cumsum(0) - 1
        for answer, token in zip(packed, logits[ends.to(logits.device)].argmax(dim=-1).tolist(), strict=True):
            answer.generated.append(token)


def _finished(answer: Answer) -> bool:
    """An answer ends with the token that ends the expected one, or at its length."""
    last = answer.generated[-1:] == answer.expected[-1:]
    return last or len(answer.generated) >= len(answer.expected)


def _image_tokens(vision: Stage, data: ChatDataset, answer: Answer) -> Tensor:
    """The projected tokens of the images that the prompt shows: [tiles * image tokens, 1, width]."""
    tiles = _tiles(data, _images_shown(data, answer))
    pixels = pixels_of(data.sample(answer.sample))[:tiles].to("cuda")
    media = {VISION.size: Images(together(tiles), values=pixels)}
    return vision(Microbatch(lengths=(len(answer.prompt),), samples=1, useful_tokens=0, media=media))


def _images_shown(data: ChatDataset, answer: Answer) -> list[tuple[int, FeatureOrder]]:
    """Features of each image that the prompt shows, and which of them it reads."""
    tokens = answer.prompt.count(data.manifest["image_token_id"])
    sample, each = data.sample(answer.sample), data.manifest["tokens_per_tile"]
    features, orders = [image.tiles * each for image in sample.images], sample.orders
    shown = int(np.searchsorted(np.cumsum([len(order) for order in orders]), tokens, side="right"))
    return list(zip(features, orders, strict=True))[:shown]


def _tiles(data: ChatDataset, images: list[tuple[int, FeatureOrder]]) -> int:
    return sum(features for features, _ in images) // int(data.manifest["tokens_per_tile"])


def _pack(data: ChatDataset, answers: Sequence[Answer]) -> Microbatch:
    texts = [answer.prompt + answer.generated for answer in answers]
    ids = torch.tensor([token for text in texts for token in text], device="cuda")
    shown = [_images_shown(data, answer) for answer in answers]
    images = [image for of_answer in shown for image in of_answer]
    begins = np.cumsum([0, *map(len, texts)]).tolist()
    starts = (data.sample(answer.sample).image_starts[: len(some)] for answer, some in zip(answers, shown, strict=True))
    seen = Images(
        pieces=together(_tiles(data, images)),
        positions=(ids == data.manifest["image_token_id"]).nonzero().squeeze(1),
        starts=tuple(begin + one for begin, some in zip(begins, starts, strict=False) for one in some),
        **{name: tensor.to("cuda") for name, tensor in order_tensors(images).items()},
    )
    return Microbatch(
        lengths=tuple(map(len, texts)),
        samples=len(texts),
        useful_tokens=len(ids),
        media={VISION.size: seen},
        input_ids=ids,
        prefixes=tuple(len(answer.prompt) for answer in answers),
    )


if __name__ == "__main__":
    sys.argv[0] = "evaluate"
    run_tool(main)
