"""A transformers InternVL on a stream of samples that nobody has packed; each phase of a step is balanced as it comes.

    torchrun --nproc-per-node 2 examples/train_stream.py --data DATA --steps 20

Every rank reads samples of its own, at random, four at a time. Images go to ranks so that these have as many tiles;
their features go to where their samples are read, so that ranks have as many tokens. The same steps are run without
that first: the losses are the same. The last line is samples a second, balanced over as they came.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset
from transformers_packs import DEVICE, in_bf16, leave, load_model, loss_of, on_device, parser, start_ranks, trained

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.stream import StreamStep, StreamSteps
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.rebalance.phases import phases_of

EACH = 4  # samples that a rank reads for a step


class Stream(IterableDataset):
    """A rank's share of a dataset, in random order, for ever."""

    def __init__(self, data: ChatDataset, rank: int, ranks: int) -> None:
        self.data, self.rank, self.ranks = data, rank, ranks

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = random.Random(0)
        while True:
            order = generator.sample(range(len(self.data)), len(self.data))
            yield from map(self.data.__getitem__, order[self.rank :: self.ranks])


class TwoPhases(nn.Module):
    """The sum of the losses of the samples that are here for language."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, step: StreamStep) -> Tensor:
        """All ranks exchange features, those without tiles or without samples too."""
        width, image = self.model.config.text_config.hidden_size, self.model.config.image_token_id
        features = torch.zeros(0, width, device=DEVICE, requires_grad=True)
        if len(step.pixels):
            seen = self.model.model.get_image_features(step.pixels.to(DEVICE), return_dict=True)
            features = seen.pooler_output.flatten(0, 1).float()  # as those of ranks that have none
        features = step.send(features)
        if step.batch is None:
            return features.sum()
        inputs = on_device(step.batch)
        ids, labels = inputs.pop("input_ids"), inputs.pop("labels")
        embedded = self.model.get_input_embeddings()(ids).masked_scatter((ids == image)[..., None], features)
        return loss_of(self.model(inputs_embeds=embedded, **inputs), labels, 1)


def main() -> None:
    """Train on batches as they came, then on the same balanced."""
    arguments = parser(__doc__, packs=False).parse_args()
    rank, ranks = start_ranks()
    data = ChatDataset(arguments.data)
    phases = phases_of(PackCosts.of_model())
    speeds = {}
    for name, known in (("as they came", None), ("balanced", phases)):
        model = load_model(data, arguments)
        if model.config.model_type != "internvl":
            raise UserError(f"--model {arguments.model}: features are sent tile by tile, as an InternVL's are alone")
        steps = StreamSteps(
            Stream(data, rank, ranks), EACH, data.manifest["tokens_per_tile"],
            model.config.text_config.hidden_size, known,
        )  # fmt: skip
        losses, fuller, left, speeds[name] = train(model, islice(steps, arguments.steps), arguments.lr)
        if rank == 0:
            said = ", ".join(f"{phase} {share:.2f} (level as read: {left[phase]})" for phase, share in fuller.items())
            print(f"{name}: losses {' '.join(f'{loss:.4f}' for loss in losses)}")
            print(f"{name}: {speeds[name]:.1f} samples a second; the fullest rank's share of what it was: {said}")
    if rank == 0:
        print(f"balanced / as they came, samples per second: {speeds['balanced'] / speeds['as they came']:.2f}x")
    leave()


def train(
    model: nn.Module, steps: Iterator[StreamStep], lr: float
) -> tuple[list[float], dict[str, float], Counter, float]:
    """Losses; of each phase its fullest rank's seconds over those as read, and in how many steps all stay; samples a
    second."""
    wrapped = DistributedDataParallel(TwoPhases(model), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(trained(model), lr=lr)
    losses, samples, before, after, left = [], 0, {}, {}, Counter()
    started = time.perf_counter()
    for step in steps:
        # DDP takes the mean over ranks of what is differentiated here: this makes it the one over all counted tokens.
        with in_bf16():
            loss = wrapped(step) * dist.get_world_size() / max(1, step.counted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / dist.get_world_size()
        dist.all_reduce(total)
        losses.append(float(total))
        samples += step.samples
        for phase, placed in step.placed.items():
            before[phase] = before.get(phase, 0.0) + placed.before
            after[phase] = after.get(phase, 0.0) + placed.after
            left[phase] += placed.stays
    seconds = time.perf_counter() - started
    return losses, {phase: after[phase] / before[phase] for phase in before}, left, samples / seconds


if __name__ == "__main__":
    run_tool(main)
