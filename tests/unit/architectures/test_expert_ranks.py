"""Experts whose widths torch cannot multiply are refused by their sizes, before anything is built."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from omnibal_ext.architectures.expert_ranks import check_expert_ranks
from omnibal_ext.architectures.presets import PRESETS
from omnibal_ext.errors import UserError
from tests.languages import altered

MODEL = next(model for model in PRESETS.values() if model.language.experts)


@pytest.mark.parametrize(
    ("hidden", "inner", "tensor", "refusal"),
    [
        (64, 24, 1, None), (64, 24, 3, None),
        (64, 18, 1, "an expert's intermediate size is 18; .* multiple of 8 .16 bytes"),
        (14, 24, 1, "hidden_size is 14; .* multiple of 8 .16 bytes"),
        (64, 24, 2, "size 24, divided by 2 tensor-parallel ranks, .* smaller --tensor-model-parallel-size"),
    ],
)  # fmt: skip
def test_experts_rows_begin_at_multiples_of_16_bytes(hidden: int, inner: int, tensor: int, refusal: str | None) -> None:
    wide = replace(MODEL, language=altered(MODEL.language, hidden_size=hidden, ffn_hidden_size=inner))
    for ranks in ((1, (tensor, 2)), *([(1,)] if tensor == 1 else [])):  # no parallel size mends it
        with nullcontext() if refusal is None else pytest.raises(UserError, match=refusal):
            check_expert_ranks(wide, *ranks)
