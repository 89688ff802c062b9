"""What a layer draws by chance, under sequence parallelism."""

from contextlib import AbstractContextManager, nullcontext

from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer


def own_draws(layer: TransformerLayer) -> AbstractContextManager[None]:
    """Around a layer's forward: tensor-parallel ranks that hold other tokens draw other dropout.

    Core forks its generators around all layers, we around each, inside what may be recomputed.
    """
    config = layer.config
    draws = layer.training and (config.hidden_dropout or config.attention_dropout)
    if not (draws and config.sequence_parallel):
        return nullcontext()
    own: AbstractContextManager[None] = tensor_parallel.get_cuda_rng_tracker().fork()
    return own
