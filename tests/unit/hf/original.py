"""A transformers InternVL's weights under the names and in the layout of InternVL's own code, written down by hand."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.unit.hf.models import EXPERTS, QWEN3, SIDE, TEXT, TILE

HEADS, GROUPS, WIDTH = TEXT["num_attention_heads"], TEXT["num_key_value_heads"], 12
NAMES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Parts of transformers' names, and what they are in InternVL's files, and in those with InternLM2."""


def write_original(weights: dict[str, Tensor], folder: Path, internlm2: bool, qk_norm: bool) -> None:
    folder.mkdir()
    save_file(original_weights(weights, internlm2), folder / "model.safetensors", metadata={"format": "pt"})
    vision = {
        "model_type": "intern_vit_6b", "hidden_size": 40, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 5, "image_size": TILE, "patch_size": TILE // SIDE, "qk_normalization": qk_norm,
        "norm_type": "rms_norm" if qk_norm else "layer_norm",
        "qkv_bias": any(name.endswith("attention.q_proj.bias") for name in weights),
    }  # fmt: skip
    language = {**TEXT, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "bias": False, "tie_word_embeddings": False}
    language["architectures"] = ["InternLM2ForCausalLM" if internlm2 else "Qwen2ForCausalLM"]
    language["model_type"] = "internlm2" if internlm2 else "qwen2"
    if any(".mlp.experts." in name for name in weights):
        language |= {**QWEN3, **EXPERTS, "norm_topk_prob": True, "architectures": ["Qwen3MoeForCausalLM"]}
        language["model_type"] = "qwen3_moe"
    config = {"model_type": "internvl_chat", "ps_version": "v2", "downsample_ratio": 0.5, "select_layer": -1}
    (folder / "config.json").write_text(json.dumps({**config, "vision_config": vision, "llm_config": language}))


def original_weights(weights: dict[str, Tensor], internlm2: bool) -> dict[str, Tensor]:
    """`weights` by transformers' names on disk."""
    found, left = {}, dict(weights)
    for name in weights:
        if ".q_proj." in name and (internlm2 or name.startswith("vision_tower")):
            parts = [left.pop(name.replace(".q_proj.", f".{one}_proj.")) for one in "qkv"]
            if name.startswith("vision_tower"):
                # One linear layer gives queries of all heads, then keys, then values: reshape(tokens, 3, heads, width).
                found[renamed(name.replace(".attention.q_proj.", ".attn.qkv."), NAMES["internvl"])] = torch.cat(parts)
            else:
                found[name.replace(".self_attn.q_proj.", ".attention.wqkv.")] = packed_wqkv(*parts)
    for name, tensor in left.items():
        found[renamed(name, NAMES["internvl"] | (NAMES["internlm2"] if internlm2 else {}))] = tensor.clone()
    return found


def packed_wqkv(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """InternLM2 reads its packed output as (group, queries of the group then key then value, width)."""
    packed = torch.empty(GROUPS, HEADS // GROUPS + 2, WIDTH, query.shape[1])
    packed[:, :-2] = query.view(GROUPS, HEADS // GROUPS, WIDTH, -1)
    packed[:, -2] = key.view(GROUPS, WIDTH, -1)
    packed[:, -1] = value.view(GROUPS, WIDTH, -1)
    return packed.view(-1, query.shape[1])


def renamed(name: str, table: dict[str, str]) -> str:
    for old, new in table.items():
        name = name.replace(old, new)
    return name
