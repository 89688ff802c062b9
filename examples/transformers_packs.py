"""What the examples with transformers share: a small InternVL, attention over packs, loaders, and the flags.

A pack is one sequence; `cu_seq_lens` says where its samples lie, so no mask is made. On a GPU flash-attention takes it
so (`attn_implementation="flash_attention_2"`); elsewhere `packed_attention` runs PyTorch's own attention
sample by sample.
"""

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader
from transformers import AttentionInterface, InternVLConfig, InternVLForConditionalGeneration, PreTrainedModel

from megatron.vlm.data.batches import JoinPack
from megatron.vlm.data.dataset import ChatDataset
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.sampler import PackBatchSampler


def parser(description: str | None, packs: bool = True) -> argparse.ArgumentParser:
    """The flags of all examples; `packs`: of those that train on packs."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--data", type=Path, required=True, help="dataset folder of tools/preprocess_data.py")
    if packs:
        flags.add_argument("--packs", type=Path, required=True, help="packed index of tools/pack_data.py over it")
    flags.add_argument("--steps", type=int, default=20, help="optimizer steps")
    flags.add_argument("--model", help="a transformers InternVL to start from; without, a small random one")
    return flags


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sample; query [1, heads, T, width] -> [1, T, heads, width]."""
    assert attention_mask is None, "a mask was made"
    lengths = [query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
    grouped = query.shape[1] != key.shape[1]
    samples = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    attended = [
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped) for q, k, v in samples
    ]
    return torch.cat(attended, dim=2).transpose(1, 2), None


def internvl(data: ChatDataset, name: str | None) -> PreTrainedModel:
    """The model named, or a small random one for the dataset's tiles and words; the same on every rank."""
    AttentionInterface.register("packed", packed_attention)
    attention = {"text_config": "packed", "vision_config": "sdpa"}
    if name:
        return InternVLForConditionalGeneration.from_pretrained(name, attn_implementation=attention)
    torch.manual_seed(0)
    manifest, patch = data.manifest, 8
    size = [manifest["tile_size"]] * 2
    vision = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
              "image_size": size, "patch_size": [patch, patch]}  # fmt: skip
    text = {"model_type": "qwen2", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 512}  # fmt: skip
    config = InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=manifest["image_token_id"],
        image_seq_length=manifest["tokens_per_tile"], tie_word_embeddings=False,
    )  # fmt: skip
    return InternVLForConditionalGeneration._from_config(config, attn_implementation=attention)


def loader(data: ChatDataset, packs: Path, ranks: int, rank: int | None, reduction: str | None = None) -> DataLoader:
    """Batches of a rank; without a rank those of all ranks in turn, for what shards batches itself."""
    index = PackedIndex.open(packs)
    sampler = PackBatchSampler(index, ranks, rank)
    return DataLoader(data, batch_sampler=sampler, collate_fn=JoinPack(reduction))


def leave() -> None:
    """End together: a rank that leaves while another still talks to it takes that one down, or lets it wait.

    Call it where the model is gone: a `DistributedDataParallel` that outlives its group ends the group's threads while
    it holds Python's lock, and waits for ever if one of them needs it.
    """
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
