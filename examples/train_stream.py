"""A transformers model on a stream of samples that nobody has packed; each phase of a step is balanced as it comes.

    torchrun --nproc-per-node 2 examples/train_stream.py --data DATA --steps 20

Every rank reads samples of its own, at random, four at a time. Images go to ranks so that these have as many tiles, and
sounds so that they have as many mel frames; features go to where their samples are read, so that ranks have as many
tokens. The model is an InternVL or, for a dataset with sounds, the thinker of Qwen2.5-Omni. The same steps are run
without that first: the losses are the same. The last line is samples a second, balanced over as they came.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset
from transformers_packs import DEVICE, in_bf16, leave, load_model, loss_of, on_device, parser, start_ranks, trained

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.stream import StreamStep, StreamSteps
from megatron.vlm.hf.packs import JoinPack
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.rebalance.phases import Phase, phases_of

EACH = 4  # samples that a rank reads for a step


MARKS = {"audio": "audio_token_id", "vision": "image_token_id"}
"""By phase the field of a configuration that names the token which features replace."""


class Stream(IterableDataset):
    """A rank's share of a dataset, in random order, for ever."""

    def __init__(self, data: ChatDataset, config: Any, rank: int, ranks: int) -> None:
        self.data, self.join, self.rank, self.ranks = data, JoinPack(data, config), rank, ranks

    def __iter__(self) -> Iterator[dict[str, Any]]:
        generator = random.Random(0)
        while True:
            order = generator.sample(range(len(self.data)), len(self.data))
            yield from map(self.sample, order[self.rank :: self.ranks])

    def sample(self, number: int) -> dict[str, Any]:
        """A sample, of a model at native resolution with the grids of its images and M-RoPE's positions."""
        sample = self.data[number]
        if not self.data.rule.native:
            return sample
        grids = [grid for image in sample["images"] for grid in image.grids]
        positions = self.join([sample])["position_ids"][:, 0].T
        return sample | {"image_grid_thw": torch.tensor(grids).long().reshape(-1, 3), "position_ids": positions}


class Phases(nn.Module):
    """The sum of the losses of the samples that are here for language."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, step: StreamStep) -> Tensor:
        """All ranks exchange features, those without sounds, tiles or samples too."""
        features = {}
        for phase, given in step.inputs.items():
            features[phase] = step.send(self.encode(phase, on_device(dict(given))), phase)
        if step.batch is None:
            return sum(found.sum() for found in features.values())
        inputs = on_device(step.batch)
        ids, labels = inputs.pop("input_ids"), inputs.pop("labels")
        embedded = self.model.get_input_embeddings()(ids)
        for phase, found in features.items():
            embedded = embedded.masked_scatter((ids == getattr(self.model.config, MARKS[phase]))[..., None], found)
        return loss_of(self.model(inputs_embeds=embedded, **inputs), labels, 1)

    def encode(self, phase: str, given: Mapping[str, Tensor]) -> Tensor:
        """The features of a phase's inputs, in fp32 as those of ranks that have none."""
        config, model, (first, *_) = self.model.config, self.model.model, given.values()
        if not len(first):
            return torch.zeros(0, config.text_config.hidden_size, device=DEVICE, requires_grad=True)
        if phase == "audio":
            lengths = given["feature_lengths"]
            sounds = pad_sequence(first.split(lengths.tolist()), batch_first=True).mT
            inside = torch.arange(sounds.shape[2], device=DEVICE) < lengths[:, None]
            return model.get_audio_features(sounds, inside, return_dict=True).last_hidden_state.float()
        if "image_grid_thw" not in given:
            return model.get_image_features(first, return_dict=True).pooler_output.flatten(0, 1).float()
        times = config.vision_config.temporal_patch_size  # an image is a video of equal frames
        patches = first.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1)
        seen = model.get_image_features(patches, given["image_grid_thw"], return_dict=True)
        return torch.cat(seen.pooler_output).float()


def steps_of(data: ChatDataset, model: nn.Module, phases: Mapping[str, Phase] | None) -> StreamSteps:
    """The steps of a rank. Raises UserError for a model whose features cannot be sent one by one."""
    config, audio_token = model.config, data.media_tokens.get("frames", [None])[0]
    videos = data.rule.native and data.manifest.get("video_files")
    if config.model_type not in ("internvl", "qwen2_5_omni_thinker") or videos:
        raise UserError(
            f"{data.folder} and {config.model_type}: features are sent apart of the images of an InternVL, and of the "
            "images and sounds of Qwen2.5-Omni's thinker, without videos; train_ddp.py trains others on packs"
        )
    return StreamSteps(
        Stream(data, config, dist.get_rank(), dist.get_world_size()), EACH, data.manifest["tokens_per_tile"],
        config.text_config.hidden_size, phases, audio_token=audio_token,
    )  # fmt: skip


def main() -> None:
    """Train on batches as they came, then on the same balanced."""
    arguments = parser(__doc__, packs=False).parse_args()
    rank, _ = start_ranks()
    data = ChatDataset(arguments.data)
    phases = phases_of(PackCosts.of_model(audio_budget=int("frames" in data.media_tokens)))
    speeds = {}
    for name, known in (("as they came", None), ("balanced", phases)):
        model = load_model(data, arguments)
        steps = steps_of(data, model, known)
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
    wrapped = DistributedDataParallel(Phases(model), find_unused_parameters=True)
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
