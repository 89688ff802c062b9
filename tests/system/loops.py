"""Run as a program on ranks: the examples' loops on packs of every family, against its samples one by one.

loops.py FOLDER...

Each folder has a model, a dataset and packs. Prints, for each, the loss of the first step by one process that reads
sample by sample what transformers' own processor would give, with its own positions and masks; that of plain DDP, of
`Trainer` and of padded batches; and by how much gradients differ.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForImageTextToText

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.hf.packs import JoinPack
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.sampler import PackBatchSampler
from tests.programs import ROOT

sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(ROOT / "tests/linear_kernels"))  # which transformers looks for when it makes a model
import train_ddp
import train_trainer
from transformers_packs import load_model, loader, steps


def main() -> None:
    dist.init_process_group("gloo")
    result = {name: compare(Path(name)) for name in sys.argv[1:]}
    if os.environ["RANK"] == "0":
        print("RESULT " + json.dumps(result))


def compare(folder: Path) -> dict[str, float]:
    data, ranks = ChatDataset(folder / "data"), dist.get_world_size()
    index = PackedIndex.open(folder / "packs")
    samplers = [PackBatchSampler(index, ranks, rank) for rank in range(ranks)]
    each = index.global_batch // ranks
    packs = [pack for sampler in samplers for pack, _ in zip(sampler, range(each), strict=False)]
    model = AutoModelForImageTextToText.from_pretrained(folder / "model")
    alone = one_by_one(model, [data[sample] for pack in packs for sample in pack])
    wanted = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    arguments = Namespace(
        data=folder / "data", packs=folder / "packs", steps=1, model=folder / "model", lr=1e-3, lora=None
    )
    model = load_model(data, arguments)
    mine = loader(data, model.config, arguments.packs, ranks, dist.get_rank())
    (step,) = steps(mine, mine.batch_sampler.micro_batches, 1)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    ddp = float(train_ddp.backward(wrapped, step))
    (logged,) = train_trainer.train(arguments, ranks)
    shown = data.sizes.tiles + data.sizes.of("stills")
    return {
        "alone": alone, "ddp": ddp, "gradients": difference(model, wanted), "trainer": logged["loss"],
        "norm": float(torch.stack([gradient.norm() for gradient in wanted.values()]).norm()),
        "trainer's norm": logged["grad_norm"],
        "padded": padded(model, data, packs),
        "packs without images": float(sum(not any(shown[pack]) for pack in packs)),
    }  # fmt: skip


def one_by_one(model: Any, samples: list[dict[str, Any]]) -> float:
    """The mean loss over all counted tokens; gradients are left in the model."""
    count = sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)
    total = 0.0
    for sample in samples:
        logits = model(input_ids=sample["input_ids"][None], **processed(sample, model.config)).logits[0, :-1]
        loss = cross_entropy(logits, sample["labels"][1:], reduction="sum") / count
        loss.backward()
        total += float(loss)
    return total


def processed(sample: dict[str, Any], config: Any) -> dict[str, Tensor]:
    """What the processor of a family gives beside tokens: positions and masks are left to the model."""
    kind, ids, pixels, images = config.model_type, sample["input_ids"], sample["pixel_values"], sample["images"]
    films = {"pixel_values_videos": found} if len(found := sample.get("pixel_values_videos", ())) else {}
    if not images:
        return films
    of_image = (ids == config.image_token_id).long()[None]
    if kind in ("internvl", "llava", "vipllava", "deepseek_vl", "video_llava"):
        return {"pixel_values": pixels, **films}
    if kind in ("idefics3", "smolvlm"):
        filled = torch.ones(1, len(pixels), *pixels.shape[-2:], dtype=torch.bool)
        return {"pixel_values": pixels[None], "pixel_attention_mask": filled}
    if kind == "gemma3":
        return {"pixel_values": pixels, "token_type_ids": of_image}
    if kind in ("llava_next", "llava_next_video", "llava_onevision"):
        given = {"pixel_values": pixels, "image_sizes": torch.tensor([(one.height, one.width) for one in images])}
        return given | ({"batch_num_images": torch.tensor([len(images)])} if kind == "llava_onevision" else {})
    return at_native_resolution(sample, config, of_image)


def at_native_resolution(sample: dict[str, Any], config: Any, of_image: Tensor) -> dict[str, Tensor]:
    kind, ids, pixels, images = config.model_type, sample["input_ids"], sample["pixel_values"], sample["images"]
    if kind in ("gemma4", "gemma4_unified"):
        return {**placed(pixels, images, 3 if kind == "gemma4" else 1), "mm_token_type_ids": of_image}
    if kind in ("mistral3", "lighton_ocr"):
        return put_together(pixels, images)
    if kind == "paddleocr_vl":
        return {**row_by_row(pixels, images), "mm_token_type_ids": of_image}
    frames = pixels if pixels.dim() == 5 else torch.stack([pixels, pixels], dim=2)
    given = {"mm_token_type_ids": of_image + 2 * (ids == config.video_token_id).long()[None]}
    if kind.startswith("glm") and images[0].film:  # whose videos have the images' token
        given = {"mm_token_type_ids": 2 * of_image}
    if "omni" in kind:  # without a mask it makes no positions
        given["attention_mask"] = torch.ones_like(ids)[None]
    at = 0
    for image in images:
        steps = len(image.film.times) if image.film else 1
        rows = frames[at : at + steps * image.rows * image.columns].reshape(-1, frames[0].numel())
        at += len(rows)
        grid = torch.tensor([(steps, image.rows, image.columns)])
        names = ("pixel_values_videos", "video_grid_thw") if image.film else ("pixel_values", "image_grid_thw")
        more = {names[0]: rows, names[1]: grid}
        if image.film and kind == "qwen2_5_vl":
            more["second_per_grid_ts"] = torch.tensor([image.film.seconds])
        given |= {name: torch.cat([given[name], value]) if name in given else value for name, value in more.items()}
    return given


def order_of(image: Any, square: int) -> list[tuple[int, int]]:
    """Row and column of each patch, square by square."""
    corners = product(range(0, image.rows, square), range(0, image.columns, square))
    return [(y + a, x + b) for y, x in corners for a, b in product(range(square), range(square))]


def row_by_row(pixels: Tensor, images: Sequence[Any]) -> dict[str, Tensor]:
    """PaddleOCR-VL's patches, of one frame each."""
    patches, found = iter(pixels), []
    for image in images:
        of_place = dict(zip(order_of(image, 2), patches, strict=False))
        found += [of_place[place] for place in sorted(of_place)]
    return {
        "pixel_values": torch.stack(found),
        "image_grid_thw": torch.tensor([(1, image.rows, image.columns) for image in images]),
    }


def placed(pixels: Tensor, images: Sequence[Any], square: int) -> dict[str, Tensor]:
    """Gemma 4's patches, colours last, filled up to those of the largest image; where it has a tower, from 0 to 1."""
    most, patches = max(image.tiles for image in images), iter(pixels / 2 + 0.5 if square > 1 else pixels)
    values = torch.zeros(len(images), most, pixels[0].numel())
    places = torch.full((len(images), most, 2), -1)
    for number, image in enumerate(images):
        for at, (row, column) in enumerate(order_of(image, square)):
            values[number, at] = next(patches).movedim(0, -1).flatten()
            places[number, at] = torch.tensor([column, row])
    return {"pixel_values": values, "image_position_ids": places}


def put_together(pixels: Tensor, images: Sequence[Any]) -> dict[str, Tensor]:
    """Pixtral's pictures, filled up to the largest."""
    side, patches = pixels.shape[-1], iter(pixels)
    sizes = torch.tensor([(image.rows * side, image.columns * side) for image in images])
    pictures = torch.zeros(len(images), 3, *sizes.amax(0))
    for number, image in enumerate(images):
        for row, column in order_of(image, 2):
            pictures[number, :, row * side :, column * side :][:, :side, :side] = next(patches)
    return {"pixel_values": pictures, "image_sizes": sizes}


def difference(model: torch.nn.Module, wanted: dict[str, Tensor]) -> float:
    """Largest difference of gradients, relative to each weight's largest; those of biases of keys are zero but for
    rounding."""
    scales = {name: float(gradient.abs().max()) for name, gradient in wanted.items()}
    least, found = 1e-4 * max(scales.values()), dict(model.named_parameters())
    return max(float((found[name].grad - wanted[name]).abs().max()) / max(least, scales[name]) for name in wanted)


@torch.no_grad()
def padded(model: Any, data: ChatDataset, packs: list[list[int]]) -> float:
    """By how much the logits' loss of a padded batch differs from that of its samples packed."""
    pack = max(packs, key=len)
    join, samples = JoinPack(data, model.config), [data[sample] for sample in pack]
    losses = [model(**batch).loss for batch in (join(samples), train_ddp.pad(samples, join))]
    return abs(float(losses[0] - losses[1]))


if __name__ == "__main__":
    main()
