"""What the examples with transformers share: the device, the model, its packs, the steps of an epoch, and the flags.

Any model of the families that `megatron.vlm.hf.packs` knows trains so: where there are GPUs each rank on its own, over
NCCL, with products in bf16 and flash-attention where that is installed; else on the CPU, over gloo, in fp32.
"""

import argparse
import gc
import os
from collections.abc import Iterable, Iterator
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
from megatron.vlm.platform import HAS_CUDA  # without CUDA, `torch.cuda.is_available` is one of Megatron's stand-ins
from omnibal_ext.errors import UserError, exit_on_user_error
from omnibal_ext.joining.checks import packs_of
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.sampler import PackBatchSampler

with exit_on_user_error():
    from transformers import (
        AutoModelForImageTextToText,
        InternVLConfig,
        PreTrainedModel,
        Qwen2_5OmniThinkerConfig,
    )
    from transformers.utils import is_flash_attn_2_available

DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if HAS_CUDA else torch.device("cpu")
"""Where this rank computes."""
LANGUAGE_LAYERS = r".*(language_model|text_model).*\.(q|k|v|o|gate|up|gate_up|down)_proj"
"""What `--lora` adapts; ViT and projector are left as they are."""


def parser(description: str | None, packs: bool = True) -> argparse.ArgumentParser:
    """The flags of all examples; `packs`: of those that train on packs."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--data", type=Path, required=True, help="dataset folder of omnibal preprocess")
    flags.set_defaults(lora=None)
    if packs:
        flags.add_argument("--packs", type=Path, required=True, help="packed index of omnibal pack over it")
        flags.add_argument("--lora", type=int, metavar="RANK", help="train adapters of language layers alone (peft)")
    flags.add_argument("--steps", type=int, default=20, help="optimizer steps")
    flags.add_argument("--model", help="a folder of transformers' to start from; without, a small random model")
    flags.add_argument("--lr", type=float, default=1e-3, help="learning rate; for a trained model about 1e-5")
    return flags


def start_ranks() -> tuple[int, int]:
    """Join the process group, and return (rank, world size)."""
    if "RANK" not in os.environ:
        raise UserError("start it with torchrun, which says how many ranks there are: torchrun --nproc-per-node 2 ...")
    if HAS_CUDA:
        torch.cuda.set_device(DEVICE)
        torch.distributed.init_process_group("nccl", device_id=DEVICE)
    else:
        torch.distributed.init_process_group("gloo")
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def in_bf16() -> torch.autocast:
    """A block whose products are in bf16 on a GPU. Weights stay in fp32: in bf16 a step of 1e-5 rounds to none."""
    return torch.autocast(DEVICE.type, torch.bfloat16, enabled=HAS_CUDA)


def load_model(data: ChatDataset, arguments: argparse.Namespace) -> torch.nn.Module:
    """The model named, or a small random one for the dataset's tiles and words, on the device; on every rank the same.

    What is trained is in fp32, beside adapters the rest as it is stored.
    """
    torch.manual_seed(0)
    if arguments.model:
        dtype = "auto" if arguments.lora else torch.float32
        model = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=dtype)
    else:
        model = (small_thinker if "audio" in data.manifest else small_internvl)(data.manifest)
    if HAS_CUDA and is_flash_attn_2_available():  # PyTorch's own makes a mask of a pack, T x T
        model.set_attn_implementation(dict.fromkeys(packs_of(model.config).flash, "flash_attention_2"))
    return (with_adapters(model, arguments.lora) if arguments.lora else model).to(DEVICE)


def with_adapters(model: PreTrainedModel, rank: int) -> torch.nn.Module:
    """The model with low-rank adapters beside its language layers, and all else frozen."""
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


def small_thinker(manifest: dict[str, Any]) -> PreTrainedModel:
    """Random weights of Qwen2.5-Omni's thinker, which hears. Raises UserError for the sounds of another model."""
    heard = manifest["audio"]["encoder"]
    if heard["channels"]:
        raise UserError("the small model hears as Qwen2.5-Omni does, these sounds are another model's: give --model")
    audio = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128,
             "output_dim": 128, "num_mel_bins": heard["mel_bins"], "n_window": heard["chunk"] // 2}  # fmt: skip
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 128,
              "patch_size": manifest["tile_size"], "window_size": 8 * manifest["tile_size"],
              "fullatt_block_indexes": [1]}  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    text = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 256, "vocab_size": manifest["vocab_size"], "rope_parameters": rope}  # fmt: skip
    config = Qwen2_5OmniThinkerConfig(
        audio_config=audio, vision_config=vision, text_config=text, image_token_id=manifest["image_token_id"],
        audio_token_id=manifest["audio_token_id"], video_token_id=manifest.get("video_token_id") or -1,
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
    """`count` times the packs of a rank for one optimizer step, on the device, epoch after epoch."""
    while count:
        epoch = iter(batches)
        while count and (step := list(islice(epoch, micro_batches))):
            yield on_device(step)
            count -= 1


def on_device(batch: Any) -> Any:
    """The same with all its tensors on the device; `JoinPack` makes them on the host, in the loader's workers."""
    if isinstance(batch, dict):
        return {name: on_device(value) for name, value in batch.items()}
    if isinstance(batch, list):
        return [on_device(value) for value in batch]
    return batch.to(DEVICE) if isinstance(batch, Tensor) else batch


def counted(step: list[dict[str, Any]]) -> Tensor:
    """Tokens of a step that count in the loss."""
    return sum(((batch["labels"] != IGNORED).sum() for batch in step), torch.tensor(0))


def loss_of(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int) -> Tensor:
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
