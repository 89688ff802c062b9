"""A language model is a list of layers, as its reader says it; hashes have all of it, older ones as they always had."""

import json
import random
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.huggingface import read_fields
from omnibal_ext.architectures.presets import PRESETS, TINY
from omnibal_ext.families.registry import FAMILIES
from omnibal_ext.modalities.language.layer import Attention, Layer
from omnibal_ext.modalities.language.linear_attention import LinearAttention
from omnibal_ext.modalities.language.rope import RopeScaling
from tests.languages import altered

CONFIGS = {name: known.config for family in FAMILIES for name, known in family.presets.items()}
OLDER = json.loads(Path(__file__).with_name("older_hashes.json").read_text())
"""A preset, fields of sections of its config.json that are changed, and the hash of when layers were no list."""
SHARED: dict[str, Any] = {
    "norm_epsilon": 0.5, "centred_norms": True, "scaled_words": False, "logit_cap": 9.0, "hidden_size": 9,
    "ffn_hidden_size": 7, "activation": "silu", "branch_norms": False, "layer_scalar": False, "layer_inputs": None,
    "kv_heads": 4, "head_dim": 7, "qkv_bias": True, "qk_norm": False, "query_scale": 9, "score_cap": 9.0,
    "output_gate": True, "sees_prefix": True, "images_whole": True, "sees_images": True, "window": 9, "theta": 9.0,
    "scaling": RopeScaling("linear", 9.0), "sections": (1, 2, 3), "interleaved": True, "rotated": 8,
}  # fmt: skip
"""Fields, and values that Gemma 4 E2B has not."""


@pytest.mark.parametrize(("name", "sections", "wanted"), OLDER)
def test_hashes_of_older_families_stay(name: str, sections: dict[str, Any], wanted: str) -> None:
    """Files note them: windows in all layers or none, widths of heads said and not, shared keys, dense layers."""
    config = CONFIGS[name] | {section: CONFIGS[name][section] | own for section, own in sections.items()}
    assert read_fields("m", config, "m").hash == wanted


@pytest.mark.parametrize("field", SHARED)
def test_hashes_of_older_families_have_what_all_layers_share(field: str) -> None:
    model = PRESETS["gemma-4-e2b"]
    assert replace(model, language=altered(model.language, **{field: SHARED[field]})).hash != model.hash


def others(value: Any) -> Iterator[Any]:
    """The value with each number, word or flag in it changed, one at a time; something where there is nothing."""
    if is_dataclass(value):
        for one in fields(value):
            yield from (replace(value, **{one.name: other}) for other in others(getattr(value, one.name)))
    else:
        yield not value if isinstance(value, bool) else (value or 0) + 1 if not isinstance(value, str | tuple) else "x"


def as_list(name: str) -> Architecture:
    """A preset as it would be if its family were new."""
    model = PRESETS[name]
    return replace(model, language=replace(model.language, older=None))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["gemma-3-4b", "gemma-4-e2b", "gemma-4-26b-a4b", "qwen3.5-35b-a3b", "glm-4.5v"])
def test_a_hash_has_all_of_every_layer(name: str, seed: int) -> None:
    model = as_list(name)
    each = list(model.language.each_layer)
    number = random.Random(seed).randrange(len(each))
    hashes = {model.hash}
    for other in (changed := list(others(each[number]))):
        layers = (*each[:number], other, *each[number + 1 :])
        hashes.add(replace(model, language=replace(model.language, each_layer=layers)).hash)
    assert len(changed) > 10
    assert len(hashes) == 1 + len(changed)


def test_a_reader_may_say_any_list() -> None:
    """Three layers with a state and one with attention, of which every second has a window, wider heads, a gate."""
    state = Layer(LinearAttention(2, 4, 16, 16, 4), 96)
    plain, near = (Layer(one, 96) for one in (Attention(4, 2, 32), Attention(4, 1, 64, output_gate=True, window=8)))
    pattern = (*[state] * 3, plain, *[state] * 3, near)
    model = replace(TINY, language=replace(TINY.language, each_layer=pattern * 2, older=None))
    assert model.language.layers == 16
    kinds = [kind for kind in model.cost_kinds if kind.startswith("llm")]
    assert [kinds.index(kind) for kind in kinds[:8]] == [0, 0, 0, 3, 0, 0, 0, 7]
    assert kinds[:8] == kinds[8:]
    assert [model.layer(kinds[number]) for number in (0, 3, 7)] == [state, plain, near]
