"""Adapters are peft's: logits, loss and gradients, the files they are kept in, and the weights they are merged into."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.vlm.hf.adapters import AdaptedLayer, adapted_layers, read_peft, write_peft
from megatron.vlm.hf.names import sources
from megatron.vlm.hf.peft_config import PeftExtras
from omnibal_ext.adapters import Adapters
from omnibal_ext.architectures.presets import preset
from omnibal_ext.errors import UserError
from tests.distributed.conftest import run_program
from tests.languages import altered
from tests.long import short
from tests.programs import ENGINE, PLAIN
from tests.unit.hf.models import CLAMPING

pytest.importorskip("transformers")
pytest.importorskip("peft")
TOLERANCE = 1e-5  # seen: 3e-6
TINY = preset("tiny")

UNEVEN = "internvl yarn, groups of heads that two ranks do not share evenly"
UNEVEN_LINEAR = "qwen3.5 tied, groups of heads of linear attention that two ranks do not share evenly"
WAYS = {
    "one rank": (
        1, PLAIN, ("internvl", "gemma 3", "gemma 4", "qwen3.5-moe", "paligemma 2", "paddleocr-vl"),
        ("gemma 4 unified", "mistral 3"),
    ),
    "two tensor-parallel ranks": (
        2, PLAIN, ("internvl", UNEVEN, UNEVEN_LINEAR, CLAMPING), ("internvl qwen3-moe", "glm-4.1v", "idefics 3"),
    ),
    "two tensor-parallel ranks, Transformer Engine": (2, ENGINE, ("internvl", "qwen2.5-vl"), ()),
}  # fmt: skip
"""Ranks, machine, the families that are always tried, and those of the long suite, whose layers others have too."""
KEPT, FURTHER = ([(way, one) for way, of in WAYS.items() for one in of[at]] for at in (2, 3))


@cache
def differences(way: str, often: bool) -> dict[str, Any]:
    """Of the families that are always tried, or of the others."""
    ranks, server, *families = WAYS[way]
    return run_program("tests.unit.hf.adapted", ranks, *families[not often], server=server)


@pytest.mark.starts
@pytest.mark.parametrize("case", short([*KEPT, *FURTHER], KEPT), ids=" ".join)
def test_a_family_with_adapters_equals_peft(case: tuple[str, str]) -> None:
    """Read from peft's folder, computed, saved by Megatron, written as peft's again and merged."""
    way, family = case
    found = differences(way, case in KEPT)[family]
    assert found["scale"] > 0.5, "adapters that change nothing"
    figures = {name: found[name] for name in ("logits", "loss", "gradients", "merged", "by peft")}
    assert {name: value for name, value in figures.items() if not value < TOLERANCE} == {}
    assert not found["bits lost"]


LAYERS = adapted_layers(TINY, sources(TINY, "internvl", "llama"))
PACKED = adapted_layers(TINY, sources(TINY, "internvl_chat", "internlm2"))
"""Of InternVL's own files, whose query, key and value are one matrix."""
ADAPTERS = Adapters(2, 6.0, ("vit", "llm"))


def some_adapters(layers: dict[str, AdaptedLayer]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {n: s for x in layers.values() if x.target in ADAPTERS.targets for n, s in x.shapes(ADAPTERS.rank).items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def written(folder: Path, layers: dict[str, AdaptedLayer], is_remote_code: bool = False) -> dict[str, torch.Tensor]:
    ours = some_adapters(layers)
    chosen = {name: layer for name, layer in layers.items() if layer.target in ADAPTERS.targets}
    write_peft(folder, chosen, ADAPTERS, ours, TINY, "the model", is_remote_code, "", PeftExtras())
    return ours


def test_matrices_that_are_packed_have_adapters_of_as_many_times_the_rank(tmp_path: Path) -> None:
    """B A of what is written is that of ours, part by part; and it is read back bit by bit."""
    ours = written(tmp_path, PACKED, is_remote_code=True)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    name = "language_model.model.layers.0.attention.wqkv"
    assert (config["rank_pattern"][name], config["alpha_pattern"][name]) == (6, 18.0)
    assert name in config["target_modules"]
    theirs = load_file(tmp_path / "adapter_model.safetensors")
    product = theirs[f"base_model.model.{name}.lora_B.weight"] @ theirs[f"base_model.model.{name}.lora_A.weight"]
    a, b = (ours[f"links.llm_0.self_attention.linear_qkv_adapter.{one}"] for one in "ab")
    attention, rows = TINY.language.attentions[0], []
    width = attention.head_dim
    group = [attention.heads // attention.kv_heads * width, width, width]
    for number, part in enumerate(b.split(group * attention.kv_heads)):
        rows.append(part @ a.chunk(3)[number % 3])
    assert torch.allclose(product, torch.cat(rows), atol=1e-5)
    back = read_peft(tmp_path, PACKED, TINY)
    assert back.adapters == ADAPTERS
    assert back.ours.keys() == ours.keys()
    assert all(torch.equal(back.ours[one], ours[one]) for one in ours)


def test_one_a_of_a_packed_matrix_serves_query_key_and_value(tmp_path: Path) -> None:
    """As peft trains it: three A alike, and the function is the same."""
    layer = PACKED["links.llm_0.self_attention.linear_qkv.weight"]
    a, b = torch.randn(2, layer.matrix.columns), torch.randn(layer.matrix.rows, 2)
    stem = f"base_model.model.{layer.theirs[0]}"
    save_file({f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    read = read_peft(tmp_path, PACKED, TINY)
    assert read.adapters == Adapters(2, 4.0, ("llm",))
    ours = read.ours
    mine = [ours.pop(f"{layer.adapter_name}.{one}") for one in "ab"]
    found = layer.merged(torch.zeros(layer.matrix.rows, layer.matrix.columns), *mine, 2.0)
    assert torch.allclose(found, 2 * b @ a, atol=1e-5)  # InternLM2's rows lie as ours
    assert ours
    assert not any(tensor.any() for tensor in ours.values()), "what peft did not adapt stays as it is"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"r": 0}, "r must be"),
        ({"lora_alpha": -1}, "lora_alpha must be"),
        ({"r": 3}, "has rank 2, r or rank_pattern says 3"),
        ({"rank_pattern": {"q_proj": 4}}, r"q_proj has rank 2, r or rank_pattern says 4"),
        ({"alpha_pattern": {"q_proj": 4}}, r"scale \S+q_proj by 2, r and lora_alpha by 3; .* merge it with peft"),
        ({"use_rslora": True, "alpha_pattern": {"q_proj": 4}}, r"scale \S+q_proj by 2.82843, r and .* by 4.24264"),
        ({"rank_pattern": {"(.*)_proj": 2}}, r"rank_pattern has '\(\.\*\)_proj'"),
        ({"alpha_pattern": {}}, r"scale \S+qkv by 1, r and lora_alpha by 3"),
    ],
)
def test_adapters_of_several_ranks_or_scales_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    """A packed matrix has as many times the alpha as it has times the rank."""
    layers = PACKED if changed == {"alpha_pattern": {}} else LAYERS
    written(tmp_path, layers, is_remote_code=layers is PACKED)
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | changed
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=said):
        read_peft(tmp_path, layers, TINY)


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    written(tmp_path, LAYERS)
    wider = replace(TINY, language=altered(TINY.language, ffn_hidden_size=2 * TINY.language.usual.ffn_hidden_size))
    with pytest.raises(UserError, match=r"mlp\.gate_proj.*of another model"):
        read_peft(tmp_path, adapted_layers(wider, sources(wider, "internvl", "llama")), wider)
    few = {name: layer for name, layer in LAYERS.items() if "llm_0" not in name}
    with pytest.raises(UserError, match=r"adapters of language_model.model.layers.0.mlp.down_proj, which has none"):
        read_peft(tmp_path, few, TINY)
