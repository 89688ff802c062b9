"""The mean loss of a checkpoint over a dataset, sample by sample: no packs, no schedule, no loader, no loss of ours.

python -m tests.system.held_out_loss CHECKPOINTS DATASET
"""

import json
import sys

import torch

from examples.demo.evaluate import split_chain
from megatron.vlm.checkpoint.guard import load_complete
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.inputs.images import pixels_of
from megatron.vlm.media import Images, together
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.single import single_process


@torch.no_grad()
def main() -> None:
    load, folder = sys.argv[1:]
    data, total, counted = ChatDataset(folder), 0.0, 0
    flags = ["--load", load, "--no-load-optim", "--no-load-rng", "--ckpt-format", "torch_dist"]
    with single_process("tiny", flags) as inputs:
        chain = Chain.of(inputs.args, inputs.architecture)
        stages = split_chain(chain)
        load_complete(stages, None, None)
        for sample in range(len(data)):
            losses = losses_of(stages, data, sample)
            counts = torch.from_numpy(data.sample(sample).text[1][1:]) > 0
            total, counted = total + losses[counts].sum().item(), counted + int(counts.sum())
    print("RESULT " + json.dumps({"loss": total / counted, "counted": counted}))


def losses_of(stages: list[torch.nn.Module], data: ChatDataset, sample: int) -> torch.Tensor:
    """Of every token but the first, [T - 1] fp64."""
    vision, language = (stage.eval() for stage in stages)
    ids, pixels = torch.from_numpy(data.sample(sample).text[0]).long(), pixels_of(data.sample(sample))
    where = (ids == data.manifest["image_token_id"]).nonzero().squeeze(1)
    images = Images(together(len(pixels)), values=pixels, positions=where)
    alone = Microbatch((len(ids),), 1, len(ids), media={"tiles": images}, input_ids=ids)
    language.set_input_tensor(vision(alone))
    return torch.nn.functional.cross_entropy(language(alone)[:-1].double(), ids[1:], reduction="none")


if __name__ == "__main__":
    main()
