"""Operations of a model are those that torch counts when it is run: forward and backward, sample by sample."""

import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs import operations
from omnibal_ext.costs.operations import ModelOperations, peak_operations

TINY = preset("tiny")


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
    square = llm.layers * 2 * g * (3 if reaches["llm"] else 1)
    assert (found.units["tiles"], found.square) == (pytest.approx(tile), pytest.approx(square))
    attention = llm.attentions[0]
    matrices = g * (attention.heads + 2 * attention.kv_heads) * attention.head_dim + g * g
    matrices += 3 * g * llm.usual.ffn_hidden_size
    token, counted = 2 * llm.layers * matrices * passes("llm"), 2 * g * llm.vocab_size * passes("llm")
    assert (found.units["tokens"], found.counted) == (pytest.approx(token), pytest.approx(counted))
    # Two samples of 40 and 9 tokens, of which 12 are to be predicted, with three tiles.
    assert found.total({"tiles": 3, "tokens": 49}, 1681, 12) == pytest.approx(
        3 * tile + 49 * token + 1681 * square + 12 * counted
    )


@pytest.mark.parametrize("package", ["flash-attn-4", "flash-attn"])
def test_analytic_tools_ask_for_flash_attention_4_by_its_package(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def known(name: str) -> str:
        if name != package:
            raise operations.PackageNotFoundError(name)
        return "4.0.0b30"

    monkeypatch.setattr(operations, "version", known)
    assert operations.installed_attention() == ("flash_attention_4" if package == "flash-attn-4" else "")
