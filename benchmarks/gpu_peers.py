"""The samples of `benchmarks/gpu.py` in a plain loop of transformers on one device: what a user has who has no packer.

bf16, torch's own attention, AdamW in one kernel; loss over the learnt tokens of a step.

    one at a time    every sample alone: nothing is padded
    padded           batches of samples, as many as a pack has, padded to the longest
    packs            the trainer's packs, samples told apart by their positions
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from benchmarks.gpu_packs import LEARNT, Packs, Sample
from megatron.vlm import platform
from omnibal_ext.architectures.architecture import Architecture

Batch = dict[str, torch.Tensor]
IMAGE = 7
"""The word that stands for an image's features."""


def peers(architecture: Architecture, packs: Packs, pad: int = 4) -> dict[str, float]:
    """Useful tokens a second of each way, over one step of the packs' samples, behind one to warm up; 0.0 where the
    device has too little memory for it: such a loop makes logits of all tokens, not of those that are learnt."""
    model = _model(architecture)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=platform.HAS_CUDA)
    samples = [sample for pack in packs for sample in pack]
    ways = {
        "one at a time": [[sample] for sample in samples],
        "padded": [samples[n : n + pad] for n in range(0, len(samples), pad)],
        "packs": packs,
    }
    found = {}
    for way, groups in ways.items():
        batches = [_joined(architecture, group, way == "packs") for group in groups]
        try:
            _step(model, optimizer, batches[:1])
            began = platform.now()
            _step(model, optimizer, batches)
            found[way] = sum(tokens for _, tokens in samples) / (platform.now() - began)
        except torch.OutOfMemoryError:
            found[way] = 0.0
        optimizer.zero_grad(set_to_none=True)
    return found


def _step(model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Batch]) -> None:
    learnt = sum(int((batch["labels"] >= 0).sum()) for batch in batches)
    for batch in batches:
        given = {name: tensor.to("cuda", non_blocking=True) for name, tensor in batch.items()}
        labels = given.pop("labels")[:, 1:].flatten()
        logits = model(**given, use_cache=False).logits[:, :-1].flatten(0, 1).float()
        (cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / learnt).backward()
        del logits
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _model(architecture: Architecture) -> Any:
    """The same sizes as transformers builds them, with weights of its own."""
    from transformers import InternVLConfig, InternVLForConditionalGeneration

    eye, words = architecture.vision, architecture.language
    attention = words.attentions[0]
    vision = {
        "hidden_size": eye.hidden_size, "num_hidden_layers": eye.layers, "num_attention_heads": eye.heads,
        "intermediate_size": eye.ffn_hidden_size, "image_size": [eye.image_size] * 2,
        "patch_size": [eye.patch_size] * 2,
    }  # fmt: skip
    text = {
        "model_type": "qwen3", "hidden_size": words.hidden_size, "num_hidden_layers": words.layers,
        "num_attention_heads": attention.heads, "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim, "intermediate_size": words.usual.ffn_hidden_size,
        "vocab_size": words.vocab_size, "max_position_embeddings": 2**16,
        "tie_word_embeddings": architecture.tied,
    }  # fmt: skip
    config = InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=IMAGE,
        image_seq_length=architecture.image_tokens_per_tile, tie_word_embeddings=architecture.tied,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(platform.device()):
            model = InternVLForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    finally:
        torch.set_default_dtype(before)
    return model.train()


def _joined(architecture: Architecture, samples: Sequence[Sample], packed: bool) -> Batch:
    """Samples of random content end to end in one row, or a row each, padded behind."""
    numbers = np.random.default_rng(0)
    size, longest = architecture.vision.image_size, max(tokens for _, tokens in samples)
    rows, labels, marks, places = [], [], [], []
    for tiles, tokens in samples:
        ids = numbers.integers(IMAGE + 1, min(1000, architecture.language.vocab_size), tokens)
        ids[: architecture.image_tokens(tiles)] = IMAGE
        behind = 0 if packed else longest - tokens
        rows.append(np.pad(ids, (0, behind)))
        learnt = np.where(np.arange(tokens) < tokens - max(1, int(LEARNT * tokens)), -100, ids)
        labels.append(np.pad(learnt, (0, behind), constant_values=-100))
        marks.append(np.pad(np.ones(tokens, np.int64), (0, behind)))
        places.append(np.arange(tokens))
    join = (lambda parts: np.concatenate(parts)[None]) if packed else np.stack
    batch = {"input_ids": join(rows), "labels": join(labels)}
    batch |= {"position_ids": join(places)} if packed else {"attention_mask": join(marks)}
    found = {name: torch.from_numpy(values) for name, values in batch.items()}
    if tiles := sum(count for count, _ in samples):
        found["pixel_values"] = torch.randn(tiles, 3, size, size, dtype=torch.bfloat16)
    return found
