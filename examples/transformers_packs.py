"""What the examples with transformers share: the model, its packs, the steps of an epoch, and the flags.

Any model of the families that `megatron.vlm.hf.packs` knows trains so. On a GPU give `from_pretrained`
attn_implementation="flash_attention_2", which makes no mask for a pack; PyTorch's own attention, as here, has one.
"""

import argparse
import gc
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from megatron.vlm.data.batches import IGNORED
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.hf.packs import JoinPack
from omnibal_ext.errors import UserError
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.sampler import PackBatchSampler


@contextmanager
def installed() -> Iterator[None]:
    """Around the import of a package that not everybody has: a line, and exit code 2, where it is missing."""
    try:
        yield
    except ModuleNotFoundError as missing:
        print(f"error: {Path(sys.argv[0]).name} needs {missing.name}: pip install {missing.name}", file=sys.stderr)
        sys.exit(2)


with installed():
    from transformers import AutoModelForImageTextToText, InternVLConfig, PreTrainedModel

LANGUAGE_LAYERS = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
"""What `--lora` adapts; ViT and projector are left as they are."""


def parser(description: str | None, packs: bool = True) -> argparse.ArgumentParser:
    """The flags of all examples; `packs`: of those that train on packs."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--data", type=Path, required=True, help="dataset folder of tools/preprocess_data.py")
    flags.set_defaults(lora=None)
    if packs:
        flags.add_argument("--packs", type=Path, required=True, help="packed index of tools/pack_data.py over it")
        flags.add_argument("--lora", type=int, metavar="RANK", help="train adapters of language layers alone (peft)")
    flags.add_argument("--steps", type=int, default=20, help="optimizer steps")
    flags.add_argument("--model", help="a folder of transformers' to start from; without, a small random InternVL")
    flags.add_argument("--lr", type=float, default=1e-3, help="learning rate; for a trained model about 1e-5")
    return flags


def start_ranks() -> tuple[int, int]:
    """Meet the other ranks over gloo; this one's number, and how many there are."""
    check_torchrun()
    torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def check_torchrun() -> None:
    """Raise UserError in a program that torchrun has not started."""
    if "RANK" not in os.environ:
        raise UserError("start it with torchrun, which says how many ranks there are: torchrun --nproc-per-node 2 ...")


def load_model(data: ChatDataset, arguments: argparse.Namespace) -> torch.nn.Module:
    """The model named, or a small random one for the dataset's tiles and words; the same on every rank."""
    torch.manual_seed(0)
    if arguments.model:
        model = AutoModelForImageTextToText.from_pretrained(arguments.model)
    else:
        model = small_internvl(data.manifest)
    return with_adapters(model, arguments.lora) if arguments.lora else model


def with_adapters(model: PreTrainedModel, rank: int) -> torch.nn.Module:
    """The model with low-rank adapters beside its language layers, and all else frozen."""
    with installed():
        from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LANGUAGE_LAYERS))


def small_internvl(manifest: dict[str, Any]) -> PreTrainedModel:
    """Random weights."""
    vision = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
              "image_size": [manifest["tile_size"]] * 2, "patch_size": [8, 8]}  # fmt: skip
    text = {"model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 512}  # fmt: skip
    config = InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=manifest["image_token_id"],
        image_seq_length=manifest["tokens_per_tile"], tie_word_embeddings=False,
    )  # fmt: skip
    return AutoModelForImageTextToText.from_config(config)


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The weights that an optimizer takes."""
    return [weight for weight in model.parameters() if weight.requires_grad]


def loader(data: ChatDataset, config: Any, packs: Path, ranks: int, rank: int | None) -> DataLoader:
    """Batches of a rank; without a rank those of all ranks in turn, for what shards batches itself."""
    sampler = PackBatchSampler(PackedIndex.open(packs), ranks, rank)
    return DataLoader(data, batch_sampler=sampler, collate_fn=JoinPack(data, config))


def steps(batches: Iterable[dict[str, Any]], micro_batches: int, count: int) -> Iterator[list[dict[str, Any]]]:
    """`count` times the packs of a rank for one optimizer step, epoch after epoch."""
    while count:
        epoch = iter(batches)
        while count and (step := list(islice(epoch, micro_batches))):
            yield step
            count -= 1


def counted(step: list[dict[str, Any]]) -> Tensor:
    """Tokens of a step that count in the loss."""
    return sum(((batch["labels"] != IGNORED).sum() for batch in step), torch.tensor(0))


def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """The sum of a batch's losses over the tokens of the whole step, wherever they are.

    A model's own loss is the mean over its batch: packs with few counted tokens would weigh as much as others.
    """
    logits, labels = outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / num_items_in_batch


def leave() -> None:
    """End together: a rank that leaves while another still talks to it takes that one down, or lets it wait.

    Call it where the model is gone: a `DistributedDataParallel` that outlives its group ends the group's threads while
    it holds Python's lock, and waits for ever if one of them needs it.
    """
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
