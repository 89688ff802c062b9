"""Which samples others put together, by their own code: started by `peers.py`, with the Python that has them.

    python benchmarks/peer_orders.py QUESTION.json ANSWER.json

The answer has of every way whose package is installed its name, version and steps: a step is a pack for every rank, a
pack the numbers of its samples. "cut" is what TRL's `wrapped` cuts.
"""

import json
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

Pack = Sequence[int]
Steps = list[list[Pack]]


@dataclass(frozen=True)
class Question:
    """Samples, by their sizes, and how they are to be packed."""

    tokens: list[int]
    tiles: list[int]
    image_tokens: list[int]
    """Of `tokens`; they come first."""
    most_tokens: int
    most_tiles: int
    batch: int
    """Samples of a padded batch."""
    ranks: int
    seed: int

    def shuffled(self, things: Iterable[Any]) -> list[Any]:
        """In a random order."""
        listed = list(things)
        return random.Random(self.seed).sample(listed, len(listed))

    def batches(self, order: Iterable[int]) -> list[Pack]:
        """As they come."""
        listed = list(order)
        return [listed[at : at + self.batch] for at in range(0, len(listed) - self.batch + 1, self.batch)]

    def dealt(self, packs: Sequence[Pack]) -> Steps:
        """In turn to the ranks, as Accelerate does; the last ones, too few for a step, are left out."""
        return [list(packs[at : at + self.ranks]) for at in range(0, len(packs) - self.ranks + 1, self.ranks)]


def random_batches(question: Question) -> Steps:
    """What `Trainer` does unless it is told otherwise."""
    return question.dealt(question.batches(question.shuffled(range(len(question.tokens)))))


def group_by_length(question: Question) -> Steps:
    """`Trainer` with `train_sampling_strategy="group_by_length"`."""
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(question.seed)
    order = LengthGroupedSampler(question.batch, lengths=question.tokens, generator=generator)
    return question.dealt(question.batches(order))


def batch_rebalance(question: Question) -> Steps:
    """`Trainer` with `train_sampling_strategy="batch_rebalance"`."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    size = question.batch * question.ranks
    samplers = (
        BatchRebalanceSampler(question.tokens, size, question.ranks, 1, seed=question.seed, rank=rank)
        for rank in range(question.ranks)
    )
    return [list(step) for step in zip(*samplers, strict=True)]


def trl_rows(question: Question, strategy: str) -> tuple[list[list[int]], list[list[bool]]]:
    """Of every pack the sample of each token, and whether it is an image's."""
    from datasets import Dataset, disable_progress_bars
    from trl import pack_dataset

    disable_progress_bars()
    samples = [[number] * count for number, count in enumerate(question.tokens)]
    images = [[at < of for at in range(n)] for n, of in zip(question.tokens, question.image_tokens, strict=True)]
    packed = pack_dataset(Dataset.from_dict({"sample": samples, "image": images}), question.most_tokens, strategy)
    return packed["sample"], packed["image"]


def trl_bfd(question: Question) -> Steps:
    """TRL's `packing=True`, which its SFTTrainer refuses for vision datasets: by tokens."""
    rows, _ = trl_rows(question, "bfd")
    return question.dealt(question.shuffled(list(dict.fromkeys(row)) for row in rows))


def cut_by_wrapped(question: Question) -> dict[str, int]:
    """Samples that TRL's `packing_strategy="wrapped"` cuts, and those of them that it cuts inside their images."""
    rows, images = trl_rows(question, "wrapped")
    ends = [(one[-1], other[0]) for one, other in pairwise(rows)]
    inside = [one[-1] and other[0] for one, other in pairwise(images)]
    cut = [(sample, image) for (sample, next_one), image in zip(ends, inside, strict=True) if sample == next_one]
    return {"samples": len({sample for sample, _ in cut}), "images": len({sample for sample, image in cut if image})}


def swift_packing(question: Question) -> Steps:
    """ms-swift's `--packing true`: by tokens, of vision datasets too."""
    from swift.dataset.packing import PackingDataset, calculate_matched_group

    items: list[tuple[int, int]] = list(enumerate(question.tokens))
    packs: list[list[tuple[int, int]]] = []
    rest: list[tuple[int, int]] = []
    for first in range(0, len(items), size := PackingDataset.PACKING_BATCH_SIZE):
        ends = first + size >= len(items)
        made, rest = calculate_matched_group([*rest, *items[first : first + size]], question.most_tokens, ends)
        packs += made
    return question.dealt(question.shuffled([sample for sample, _ in pack] for pack in packs))


def axolotl_multipack(question: Question) -> Steps:
    """axolotl's `sample_packing: true`: by tokens, in a random order."""
    from axolotl.utils.samplers.multipack import MultipackBatchSampler

    order, lengths = question.shuffled(range(len(question.tokens))), question.tokens
    sampler = MultipackBatchSampler(order, 1, question.most_tokens, lengths, bin_size=len(lengths), num_processes=1)
    return question.dealt([pack for batch in sampler.generate_batches() for pack in batch])


def automodel_balanced(question: Question) -> Steps:
    """NeMo Automodel's `balance_media_tokens`, read in random order as its loader does unless told otherwise."""
    from nemo_automodel.components.datasets.vlm.neat_packing_vlm import greedy_knapsack_vt_balanced

    packs = greedy_knapsack_vt_balanced(question.tokens, question.most_tokens, question.image_tokens)
    return question.dealt(question.shuffled(packs))


def veomni_dynamic(question: Question) -> Steps:
    """VeOmni's `dyn_bsz`: each rank fills its own buffer of 200 samples, as they come."""
    from veomni.data.dynamic_batching import DynBszBuffer

    order = question.shuffled(range(len(question.tokens)))
    of_ranks = []
    for rank in range(question.ranks):
        buffer, packs = DynBszBuffer(lambda sample: question.tokens[sample]), []
        for sample in order[rank :: question.ranks]:
            buffer.append(sample)
            if len(buffer) >= VEOMNI_BUFFER and buffer.all_token_cnt >= question.most_tokens:
                packs.append(buffer.get_samples(question.most_tokens))
                buffer.flush()
        while len(buffer):
            packs.append(buffer.get_samples(question.most_tokens))
            buffer.flush()
        of_ranks.append(packs)
    return [list(step) for step in zip(*of_ranks, strict=False)]


VEOMNI_BUFFER = 200
"""`dyn_bsz_buffer_size`, unless it is told otherwise."""


def internvl_packed(question: Question) -> Steps:
    """The way of InternVL's packed dataset, written anew (it is no package): two limits, a buffer of open packs.

    Each rank packs its own samples as they come, into the open pack with most tiles that has room in both; a pack that
    is full in one of them leaves, and the one with most tiles where there are more than the buffer holds.
    """
    order = question.shuffled(range(len(question.tokens)))
    of_ranks = [_buffered(question, order[rank :: question.ranks]) for rank in range(question.ranks)]
    return [list(step) for step in zip(*of_ranks, strict=False)]


BUFFER = 20
"""Open packs, as InternVL's scripts have it."""


def _buffered(question: Question, samples: Sequence[int]) -> list[Pack]:
    def size(pack: Pack) -> tuple[int, int]:
        return sum(question.tiles[sample] for sample in pack), sum(question.tokens[sample] for sample in pack)

    def room(pack: Pack) -> bool:
        tiles, tokens = size(pack)
        return tiles <= question.most_tiles and tokens <= question.most_tokens

    opened: list[list[int]] = []
    left: list[Pack] = []
    for sample in samples:
        pack = next((pack for pack in opened if room([*pack, sample])), [])
        opened = [other for other in opened if other is not pack] + [[*pack, sample]]
        full = [
            pack for pack in opened if size(pack)[0] == question.most_tiles or size(pack)[1] == question.most_tokens
        ]
        opened = sorted((pack for pack in opened if pack not in full), key=lambda pack: -size(pack)[0])
        left += [*full, *opened[:-BUFFER]]
        opened = opened[-BUFFER:]
    return left + opened


WAYS: dict[str, tuple[str, Callable[[Question], Steps]]] = {
    "Trainer, random": ("transformers", random_batches),
    "Trainer, group_by_length": ("transformers", group_by_length),
    "Trainer, batch_rebalance": ("transformers", batch_rebalance),
    "TRL's packer, bfd": ("trl", trl_bfd),
    "ms-swift, packing": ("ms-swift", swift_packing),
    "axolotl, multipack": ("axolotl", axolotl_multipack),
    "NeMo Automodel, vt_balanced": ("nemo-automodel", automodel_balanced),
    "VeOmni, dynamic batches": ("veomni", veomni_dynamic),
    "InternVL's way, two limits": ("", internvl_packed),
}
"""By name the package it is of, and its steps."""
MODULES = {"ms-swift": "swift", "nemo-automodel": "nemo_automodel"}


def is_here(package: str) -> bool:
    """Whether a way's package is here; no package is always."""
    return not package or find_spec(MODULES.get(package, package)) is not None


def main() -> None:
    """Answer."""
    question = Question(**json.loads(Path(sys.argv[1]).read_text()))
    answer: dict[str, Any] = {"ways": {}, "missing": [name for name, (of, _) in WAYS.items() if not is_here(of)]}
    for name, (package, steps) in WAYS.items():
        if is_here(package):
            found = [[list(map(int, pack)) for pack in step] for step in steps(question)]
            answer["ways"][name] = {"version": version(package) if package else "", "steps": found}
    if is_here("trl"):
        answer["cut"] = cut_by_wrapped(question)
    Path(sys.argv[2]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
