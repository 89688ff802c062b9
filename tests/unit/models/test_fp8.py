"""FP8 through Megatron's flags: in language layers of Transformer Engine, and refused where it would reach none."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from megatron.core.fp8_utils import is_first_last_bf16_layer
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.arguments import TrainingInputs
from megatron.vlm.models import language
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.stage import Stage
from tests.distributed import harness
from tests.distributed.conftest import run_program
from tests.programs import ENGINE


@pytest.mark.starts
def test_language_layers_multiply_in_eight_bits() -> None:
    """All four, or those between the ends; losses are near bf16's and not the same. Recomputing changes nothing, nor
    does a tower beside the pipeline, which stays in bf16."""
    found = run_program("tests.unit.models.eight_bits", 1, server=ENGINE)
    assert found["multiple"] == 32
    layers = [found[f"{name}: layers"] for name in ("bf16", "fp8", "ends in bf16")]
    assert layers == [0, 4, 2]
    assert 0 < found["ends in bf16: difference"] < 0.1
    assert 0 < found["fp8: difference"] < 0.1
    assert found["layers again: difference"] == 0.0
    assert [found[f"tower beside: {what}"] for what in ("layers", "difference")] == [0.0, 0.0]


@pytest.mark.parametrize(("start", "end"), [(0, 0), (1, 1), (2, 1), (1, 2), (0, 2), (3, 0), (2, 2)])
def test_as_many_layers_at_each_end_stay_out_of_eight_bits_as_are_asked_for(
    start: int, end: int, inputs: TrainingInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four, wherever a stage begins: core is asked for each by its place in the whole model."""
    asked: list[bool] = []

    def context(config: TransformerConfig, number: int) -> AbstractContextManager[None]:
        asked.append(is_first_last_bf16_layer(config, number))
        return nullcontext()

    monkeypatch.setattr(language, "get_fp8_context", context)
    for name, value in (("first_last_layers", True), ("num_layers_at_start_in", start), ("num_layers_at_end_in", end)):
        monkeypatch.setattr(inputs.args, f"{name}_bf16", value)
    chain, pack = Chain.of(inputs.args, inputs.architecture), harness.sample_packs()[7]
    first, layers = chain.kinds.index("llm"), chain.kinds.count("llm")
    wanted = [number < start or number >= layers - end for number in range(layers)]
    for cut in range(layers):
        asked.clear()
        stage = Stage(chain, first + cut, first + layers)
        stage.set_input_tensor(torch.zeros(chain.shape_before(first + cut, pack)))
        stage(pack)
        assert asked == wanted[cut:]
