"""What a language layer's own configuration says."""

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.vlm.models.language import language_layer_config
from omnibal_ext.architectures.presets import TINY


@pytest.mark.parametrize(("dropout", "asked", "fused"), [(0.0, True, False), (0.1, True, True), (0.1, False, False)])
def test_a_residual_connection_without_dropout_is_an_addition(dropout: float, asked: bool, fused: bool) -> None:
    """One kernel either way, and a compiled function takes the host four times as long."""
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, hidden_dropout=dropout, bias_dropout_fusion=asked
    )
    assert language_layer_config(config, TINY.language, TINY.language.each_layer[0]).bias_dropout_fusion == fused
    assert config.bias_dropout_fusion == asked  # the ViT's has biases and scales to add
