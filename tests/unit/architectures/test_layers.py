"""Layers that readers say one by one are those that were derived from fields of the whole model."""

import dataclasses
from typing import Any

import pytest

from omnibal_ext.architectures.presets import PRESETS
from omnibal_ext.modalities.fields import hashed
from omnibal_ext.modalities.language.layer import Layer, LayerInputs
from omnibal_ext.modalities.language.noted import noted
from omnibal_ext.modalities.language.rope import RopeScaling
from tests.unit.architectures import old_language as old

INSIDE = {
    "rope_scaling": RopeScaling, "sliding": old.SlidingWindow, "far": old.FarHeads, "layer_inputs": LayerInputs,
    "shared_keys": old.SharedKeys, "experts": old.Experts, "linear": old.LinearAttention,
}  # fmt: skip


def plain(layer: Layer) -> Any:
    """All of a layer, as fields alone."""
    fields = dataclasses.asdict(layer)
    for name, more in (("experts", ("dense_layers", "dense_width")), ("mixer", ("layers",))):
        fields[name] = fields[name] and {key: value for key, value in fields[name].items() if key not in more}
    return fields


@pytest.mark.parametrize("name", PRESETS)
def test_each_layer_is_the_derived_one(name: str) -> None:
    language = PRESETS[name].language
    fields = noted(language)
    known = {key: INSIDE[key](**value) if key in INSIDE and value else value for key, value in fields.items()}
    before = old.LanguageArchitecture(**known)
    assert [*map(plain, before.each_layer)] == [*map(plain, language.each_layer)]
    for key in ("sliding", "linear"):  # whose numbers are a list now, as in JSON
        if fields[key]:
            fields[key]["layers"] = tuple(fields[key]["layers"])
            known[key] = dataclasses.replace(known[key], layers=fields[key]["layers"])
    assert hashed(old.LanguageArchitecture(**known)) == fields
