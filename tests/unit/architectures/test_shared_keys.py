"""Keys and values that layers take from earlier ones, and what travels for it (Gemma 4 E2B)."""

from dataclasses import replace

import numpy as np
import pytest

from omnibal_ext.architectures.huggingface import read_fields
from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.tower import language_profile
from omnibal_ext.families.gemma4.presets import PRESETS
from omnibal_ext.flow import blocks_after, language_extras
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.layer import LayerInputs
from tests.chains import layer_chain
from tests.languages import altered


def some_language(seed: int) -> LanguageArchitecture:
    """Layers of both kinds in any order, with one of each in front of those that take keys and values."""
    random = np.random.default_rng(seed)
    layers = int(random.integers(3, 12))
    near = random.random(layers) < 0.6
    near[-1] = False
    taking = int(random.integers(1, layers - 1))
    near[0], near[1 : max(2, layers - taking)] = True, near[1 : max(2, layers - taking)]
    if near[: layers - taking].all():
        near[layers - taking - 1] = False
    known = PRESETS["gemma-4-e2b"].config
    text = known["text_config"] | {
        "num_hidden_layers": layers, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
        "intermediate_size": 96, "head_dim": 8, "global_head_dim": 8, "attention_k_eq_v": False,
        "layer_types": ["sliding_attention" if one else "full_attention" for one in near],
        "num_kv_shared_layers": taking, "hidden_size_per_layer_input": 0,
    }  # fmt: skip
    return read_fields("some", {**known, "text_config": text}, "some").language


@pytest.mark.parametrize("seed", range(8))
def test_layers_take_what_transformers_lets_them(seed: int) -> None:
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

    language = some_language(seed)
    kinds = ["sliding_attention" if one.window else "full_attention" for one in language.attentions]
    taking = sum(one.reads_keys for one in language.attentions)
    config = Gemma4TextConfig(num_hidden_layers=language.layers, layer_types=kinds, num_kv_shared_layers=taking)
    modes = config.kv_sharing_modes
    stored: dict[str, int] = {}  # as its forward pass goes: the last that stored one of a kind is read
    for number, (kind, mode) in enumerate(zip(kinds, modes, strict=True)):
        if mode == "store":
            stored[kind] = number
        layer, wide = language.each_layer[number], mode == "reuse"
        assert (layer.keys_from, layer.ffn_hidden_size) == (stored[kind] if wide else None, 96 * (1 + wide))
        assert layer.attention.reads_keys == wide


def carried(language: LanguageArchitecture, number: int, ranks: int, is_shared_out: bool) -> int:
    """Tensors as large as the hidden states beside those behind a layer; -1: behind the word embedding."""
    chain = layer_chain(0, language.layers)
    extras = language_extras(chain, language, ranks, is_shared_out)
    return blocks_after(extras, len(chain), language.hidden_size)[chain.index("word_embed") + 1 + number]


@pytest.mark.parametrize("seed", range(8))
def test_keys_travel_from_who_gives_them_to_the_last_who_takes_them(seed: int) -> None:
    """Counted cut by cut, also where keys and values of a layer are more than one tensor of hidden states."""
    language = replace(some_language(seed), hidden_size=48)
    for number in range(-1, language.layers):
        read = [layer.keys_from for layer in language.each_layer[number + 1 :]]
        crossing = {giver for giver in read if giver is not None and giver <= number}
        numbers = 2 * 2 * 8 * len(crossing)
        assert carried(language, number, 1, is_shared_out=False) == -(-numbers // 48)
        first = carried(altered(language, layer_inputs=LayerInputs(8, 100, 0)), number, 1, is_shared_out=False)
        assert first == -(-numbers // 48) + (number < language.layers - 1)


def test_ranks_that_share_hidden_states_carry_as_many_times_more_of_their_keys() -> None:
    """E2B: one group of keys, 256 and 512 wide, of which each of two ranks has a copy beside 1536 of hidden states."""
    language = preset("gemma-4-e2b").language
    assert [carried(language, number, 1, True) for number in (-1, 12, 13, 14, 33, 34)] == [1, 1, 2, 2, 2, 0]
    assert [carried(language, number, 2, True) for number in (13, 14)] == [2, 3]
    assert [carried(language, number, 2, False) for number in (13, 14)] == [2, 2]
    profile, first = analytic_profile(preset("gemma-4-e2b"), "h100", {"tiles": 2520, "tokens": 4096}, 2), 1 + 16 + 2
    assert [profile.carried_after[first + number] for number in (12, 13, 14)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "billions", "without_tables"), [("gemma-4-e2b", 4.80, 2.05), ("gemma-4-e4b", 7.63, 4.14)]
)
def test_presets_have_the_published_numbers_of_parameters(name: str, billions: float, without_tables: float) -> None:
    """5.1 and 8 billion with an audio tower of .3, as published; what is no table, as 2.3 and 4.5 with it and less."""
    model = preset(name)
    profile = analytic_profile(model, "h100", {"tiles": 2520, "tokens": 4096})
    whole = sum(profile.parameters[kind] for kind in profile.cost_kinds if kind != "head")
    tables = model.language.layers * 262144 * 256 + profile.parameters["word_embed"]
    assert whole / 1e9 == pytest.approx(billions, abs=0.01)
    assert (whole - tables) / 1e9 == pytest.approx(without_tables, abs=0.01)
    assert profile.features_after[model.chain.index("word_embed")] == 1
    behind = language_profile(profile)
    assert behind.features_after == profile.features_after[model.chain.index("word_embed") :], "the tower beside it"
