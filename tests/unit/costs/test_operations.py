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


@pytest.mark.parametrize("frozen", [(), ("vit",), ("llm",), ("vit", "projector"), ("projector", "llm"),
                                    ("vit", "projector", "llm")])  # fmt: skip
def test_each_part_counts_forward_and_the_gradients_that_somebody_needs(frozen: tuple[str, ...]) -> None:
    """Of a matrix forward, of inputs where something before is trained, of weights where they are; attention twice
    backward, unless nothing up to there is trained."""
    trained = {part: part not in frozen for part in ("vit", "projector", "llm")}
    reaches = {"vit": trained["vit"], "projector": trained["vit"] or trained["projector"], "llm": any(trained.values())}
    before = {"vit": trained["vit"], "projector": trained["vit"], "llm": trained["vit"] or trained["projector"]}

    def passes(part: str) -> int:
        inside = trained[part]  # a layer of the same part stands before it
        return 1 + (before[part] or inside) * reaches[part] + trained[part]

    vit, llm, found = TINY.vision, TINY.language, ModelOperations.of(TINY, frozen)
    patches, h, g = vit.tokens_per_tile, vit.hidden_size, llm.hidden_size
    a_layer = 2 * patches * (4 * h * h + 2 * h * vit.ffn_hidden_size)
    squares = 4 * patches**2 * h
    tile = 2 * patches * 3 * vit.patch_size**2 * h * (1 + trained["vit"])
    tile += vit.layers * (a_layer * passes("vit") + squares * (3 if reaches["vit"] else 1))
    projector = 3 if trained["projector"] else 1 + trained["vit"]  # whole, though nobody needs its input's gradient
    tile += 2 * TINY.image_tokens_per_tile * (h * TINY.shuffle**2 * g + g * g) * projector
    assert found.tile == pytest.approx(tile)
    assert found.square == pytest.approx(llm.layers * 2 * g * (3 if reaches["llm"] else 1))
    matrices = g * (llm.heads + 2 * llm.kv_heads) * llm.head_dim + g * g + 3 * g * llm.ffn_hidden_size
    assert found.token == pytest.approx(2 * llm.layers * matrices * passes("llm"))
    assert found.counted == pytest.approx(2 * g * llm.vocab_size * passes("llm"))
