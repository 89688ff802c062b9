"""The tables that all figures of a layout are sums of, against a profile's own numbers."""

from dataclasses import replace

import numpy as np
import pytest

from omnibal_ext.layout.tables import KIND_OF_OPTION, WHOLE, columns_of, kind_tables, kinds_of, options_of

from .instances import make_profile

PROFILE = make_profile()


def test_only_trained_layers_have_weight_gradients_and_those_are_half_of_a_backward_unless_measured() -> None:
    costs = PROFILE.layers | {"llm": replace(PROFILE.layers["llm"], weight_gradient_seconds=1.0)}
    frozen = replace(PROFILE, layers=costs, frozen=("vit", "projector"))
    weight = kind_tables(frozen, None, microbatches=2, split_backward=True).weight[:, 0, 0]
    assert dict(zip(kinds_of(PROFILE), weight.tolist(), strict=False)) == pytest.approx(
        {"patch_embed": 0.0, "vit": 0.0, "projector": 0.0, "word_embed": 0.1, "llm": 1.0, "head": 0.1}
    )
    adapted = replace(frozen, frozen=("vit", "projector", "llm"), lora_rank=4, lora_targets=("vit", "llm"))
    assert not kind_tables(adapted, None, microbatches=2, split_backward=True).weight.any()


def test_without_packs_every_microbatch_fills_the_budgets() -> None:
    tables = kind_tables(PROFILE, None, microbatches=3, split_backward=False)
    assert tables.forward.shape == (len(columns_of(PROFILE)), 1, 3)
    for kind, forward in zip(kinds_of(PROFILE), tables.forward, strict=False):
        assert (forward == PROFILE.layers[kind].forward_seconds).all()
    whole = WHOLE[: options_of(PROFILE)]
    again = tables.recompute[whole]
    assert np.allclose(again, tables.forward[KIND_OF_OPTION[: len(whole)][whole]])  # no other figure was measured
    assert not tables.offered[~whole].any()
