"""FP8 through Megatron's flags: in language layers of Transformer Engine, and refused where it would reach none."""

import pytest

from megatron.vlm import platform
from megatron.vlm.arguments import read_arguments
from omnibal_ext.errors import UserError
from tests.distributed.conftest import run_program
from tests.programs import ENGINE

COMPLETE = "--preset tiny --lr 1e-3 --train-iters 3 --global-batch-size 1 --bf16"


@pytest.mark.starts
def test_language_layers_multiply_in_eight_bits() -> None:
    """All four, or those between the ends; losses are near bf16's and not the same. Recomputing changes nothing."""
    found = run_program("tests.unit.models.eight_bits", 1, server=ENGINE)
    assert found["multiple"] == 32
    layers = [found[f"{name}: layers"] for name in ("bf16", "fp8", "ends in bf16")]
    assert layers == [0, 4, 2]
    assert 0 < found["ends in bf16: difference"] < 0.1
    assert 0 < found["fp8: difference"] < 0.1
    assert [found[f"{what} again: difference"] for what in ("layers", "attention", "mlp")] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("flags", "engine", "words"),
    [
        ("--fp8-format hybrid --fp8-recipe tensorwise", False, ("Transformer Engine", "leave it out")),
        ("--fp8-format hybrid", True, ("delayed", "--fp8-recipe tensorwise")),
    ],
)
def test_fp8_that_reaches_no_layer_is_refused(
    monkeypatch: pytest.MonkeyPatch, flags: str, engine: bool, words: tuple[str, ...]
) -> None:
    monkeypatch.setattr(platform, "HAS_TRANSFORMER_ENGINE", engine)
    with pytest.raises(UserError) as refused:
        read_arguments(f"{COMPLETE} {flags}".split())
    assert all(word in str(refused.value) for word in words), refused.value
