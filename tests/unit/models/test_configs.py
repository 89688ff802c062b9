"""Core's configurations of the two towers: the ViT's is its own, whatever language model it is joined to."""

import functools
from dataclasses import fields, replace
from typing import Any

import pytest

from megatron.vlm.models.configs import language_config, vision_config
from omnibal_ext.architectures.presets import preset
from tests.unit.alone import megatron_alone

OF_EXPERTS = "moe_"
"""Fields that core reads where there are experts, of which a ViT has none."""


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return of_the_vit("tiny")


def of_the_vit(language: str) -> dict[str, Any]:
    """All fields of the configuration of tiny's ViT, joined to the language model of a preset."""
    with megatron_alone(language) as inputs:
        architecture = replace(inputs.architecture, vision=preset("tiny").vision)
        config = vision_config(language_config(inputs.args, inputs.architecture), architecture.vision)
    return {field.name: plain(getattr(config, field.name)) for field in fields(config)}


def plain(value: Any) -> Any:
    """Functions that were given some arguments compare by these."""
    return (value.func, value.args, value.keywords) if isinstance(value, functools.partial) else value


@pytest.mark.parametrize(
    "language", ["gemma-3-27b", "qwen3-vl-30b-a3b", "qwen2.5-vl-7b", "llava-1.6-llama3-8b", "internvl-chat-1.5"]
)
def test_no_field_of_a_vit_depends_on_its_language_model(language: str, alone: dict[str, Any]) -> None:
    """Scale of the scores, norms, activation, biases, groups of heads, experts: all that such a model has its way."""
    found = of_the_vit(language)
    assert found["num_moe_experts"] is None
    assert {
        name: (value, alone[name])
        for name, value in found.items()
        if value != alone[name] and not name.startswith(OF_EXPERTS)
    } == {}


def test_the_language_models_tried_have_what_a_vit_has_not() -> None:
    scales, norms, activations = (
        {getattr(preset(name).language, field) for name in ("tiny", "gemma-3-27b")}
        for field in ("query_scale", "centred_norms", "activation")
    )
    assert (len(scales), len(norms), len(activations)) == (2, 2, 2)
    assert preset("qwen3-vl-30b-a3b").language.experts
    assert preset("qwen2.5-vl-7b").language.qkv_bias
