"""Run as a program on one, then on two ranks: a ViT of five heads and a language model of three groups of two, from the
same seed, trained a few steps.

odd_heads.py ANSWERS.pt    one rank writes losses and weights; two compare: the largest difference, and what is not zero
of what fills up the second rank.
"""

import json
import os
import sys
from argparse import Namespace
from dataclasses import replace

import torch
from torch import Tensor

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.models.configs import language_config, vision_config
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.single import single_process
from omnibal_ext.architectures.presets import TINY

ODD = replace(
    TINY,
    vision=replace(TINY.vision, heads=5, hidden_size=80, normalization="RMSNorm", qk_norm=True),
    language=replace(TINY.language, vocab_size=500, heads=6, kv_heads=3, head_size=16, qkv_bias=True, qk_norm=True),
)
STEPS = 4
GROUPS = {"vit": 5, "llm": 3}
"""Of heads that share key and value; two ranks hold as many."""


def main() -> None:
    path, rank = sys.argv[1], os.environ["RANK"]
    with single_process("tiny", ["--tensor-model-parallel-size", os.environ["WORLD_SIZE"]]) as inputs:
        result = run(inputs.args, path)
    if rank == "0":
        print("RESULT " + json.dumps(result))


def run(args: Namespace, path: str) -> dict[str, float]:
    language = language_config(args, ODD)
    chain = Chain(ODD, language, vision_config(language, ODD.vision), vocab_size=512, seed=11)
    stage = Stage(chain, 0, len(chain.kinds))
    start = {name: weight.detach().clone() for name, weight in stage.named_parameters()}
    losses = train(stage)
    if args.tensor_model_parallel_size == 1:
        torch.save((start, losses, dict(stage.state_dict())), path)
        return {"losses": len(losses)}
    start_alone, losses_alone, end_alone = torch.load(path, weights_only=False)
    end = dict(stage.named_parameters())
    return {
        "start": largest({name: (weight, start_alone[name]) for name, weight in start.items()}, end),
        "losses": max(abs(mine - alone) for mine, alone in zip(losses, losses_alone, strict=True)),
        "weights": largest({name: (weight.detach(), end_alone[name]) for name, weight in end.items()}, end),
        "padding": largest(
            {name: (weight.detach(), 0 * end_alone[name]) for name, weight in padding(end).items()}, end
        ),
    }


def padding(weights: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """Of the attention's weights, what fills up this rank; the rest as zeros."""
    found = {}
    for name, weight in weights.items():
        if (dim := getattr(weight, "partition_dim", -1)) >= 0 and "self_attention" in name:
            groups = next(groups for kind, groups in GROUPS.items() if kind in name)
            here = (groups + 1) // 2
            true = min(groups - here * torch.distributed.get_rank(), here)
            assert weight.shape[dim] % here == 0
            part = weight.detach().clone()
            part.narrow(dim, 0, weight.shape[dim] // here * true).zero_()
            found[name] = part
    return found


def train(stage: Stage) -> list[float]:
    """Losses of a few steps of AdamW, its weight decay included."""
    generator = torch.Generator().manual_seed(2)
    tokens = ODD.image_tokens_per_tile
    ids = torch.randint(0, 500, (30,), generator=generator)
    batch = Microbatch(
        tiles=2, lengths=(20, 10), samples=2, useful_tokens=30, pixels=torch.randn(2, 3, 32, 32, generator=generator),
        input_ids=ids, image_positions=torch.arange(2 * tokens), labels=torch.roll(ids, -1),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = stage(batch).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def largest(pairs: dict[str, tuple[Tensor, Tensor]], parameters: dict[str, torch.nn.Parameter]) -> float:
    """Largest difference over all ranks; a whole weight is filled up with zeros and cut as this rank's is."""
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    worst = torch.zeros(())
    for name, (mine, whole) in pairs.items():
        dim, stride = getattr(parameters[name], "partition_dim", -1), getattr(parameters[name], "partition_stride", 1)
        wanted = whole
        if dim >= 0:
            padding = [0] * (2 * (whole.dim() - dim) - 1) + [mine.shape[dim] * ranks - whole.shape[dim]]
            filled = torch.nn.functional.pad(whole, padding)
            wanted = torch.cat(filled.chunk(ranks * stride, dim)[rank::ranks], dim)
        worst = torch.maximum(worst, (mine - wanted).abs().max())
    torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
    return worst.item()


if __name__ == "__main__":
    main()
