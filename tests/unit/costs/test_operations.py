"""Operations of a model are those that torch counts when it is run: forward and backward, sample by sample."""

from dataclasses import replace

import pytest

from omnibal_ext.architectures.presets import PRESETS, preset
from omnibal_ext.costs.operations import ModelOperations, peak_operations

TINY = preset("tiny")


def by_hand(tiles: int, lengths: list[int], counted: int) -> float:
    """The tiny model, matrix by matrix, all of it trained."""
    total, vit, llm = 0.0, TINY.vision, TINY.language
    patches, h, g = vit.tokens_per_tile, vit.hidden_size, llm.hidden_size
    total += 2 * 2 * tiles * patches * (3 * vit.patch_size**2) * h  # no gradient of the pixels
    for _ in range(vit.layers):
        matrices = h * 3 * h + h * h + 2 * h * vit.ffn_hidden_size
        total += 3 * tiles * (2 * patches * matrices + 2 * 2 * patches * patches * h)
    image_tokens = tiles * TINY.image_tokens_per_tile
    total += 3 * 2 * image_tokens * (h * TINY.shuffle**2 * g + g * g)
    for _ in range(llm.layers):
        matrices = g * (llm.heads + 2 * llm.kv_heads) * llm.head_dim + g * g + 3 * g * llm.ffn_hidden_size
        for length in lengths:
            total += 3 * (2 * length * matrices + 2 * length * length * g)  # scores and values, half of each
    return total + 3 * 2 * counted * g * llm.vocab_size


@pytest.mark.parametrize(("tiles", "lengths", "counted"), [(3, [40, 9], 12), (0, [7], 7), (5, [100, 30, 30], 1)])
def test_operations_are_those_of_the_matrices(tiles: int, lengths: list[int], counted: int) -> None:
    squares = sum(length**2 for length in lengths)
    found = ModelOperations.of(TINY).total(tiles, sum(lengths), squares, counted)
    assert found == pytest.approx(by_hand(tiles, lengths, counted), rel=1e-9)


def test_a_language_model_of_many_parameters_takes_six_operations_for_each_and_token() -> None:
    model = PRESETS["internvl-chat-1.5"]
    language = model.language
    operations = ModelOperations.of(replace(model, language=replace(language, vocab_size=1)))
    weights = language.layers * (
        language.hidden_size * (language.heads + 2 * language.kv_heads) * language.head_dim
        + language.hidden_size**2 + 3 * language.hidden_size * language.ffn_hidden_size
    )  # fmt: skip
    assert operations.token == pytest.approx(6 * weights, rel=1e-9)


def test_what_is_frozen_is_not_counted_backward() -> None:
    whole, vit, both = (ModelOperations.of(TINY, parts) for parts in ((), ("vit",), ("vit", "projector")))
    assert vit.tile < whole.tile / 2.5
    assert both.tile < vit.tile
    assert (vit.token, both.square) == (whole.token, whole.square)
    assert ModelOperations.of(TINY, ("llm",)).token == pytest.approx(whole.token * 2 / 3)


def test_the_peak_is_known_by_the_drivers_name() -> None:
    assert peak_operations("NVIDIA H200") == peak_operations("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_operations("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_operations("2 x AMD EPYC") is None
