"""What travels beside the hidden states: as many tensors as counted before, for every preset."""

import pytest

from omnibal_ext.architectures.presets import PRESETS
from omnibal_ext.flow import blocks_after, features_after, language_extras


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_as_many_travel_as_before(name: str) -> None:
    model = PRESETS[name]
    joined = bool(model.vision.side_by_side)
    assert features_after(model.chain, model.vision.feature_layers, joined) == model.features_after
    for ranks in (1, 2, 4):
        for is_shared_out in (False, True):
            extras = language_extras(model.chain, model.language, ranks, is_shared_out)
            found = blocks_after(extras, len(model.chain), model.language.hidden_size)
            assert found == (model.carried_after(ranks, is_shared_out) or (0,) * len(model.chain))
