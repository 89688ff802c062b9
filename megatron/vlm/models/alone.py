"""Layers without tensor parallelism, whatever its size: those of a replicated tower."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig


@contextmanager
def alone() -> Iterator[None]:
    """Make a context in which core sees a tensor-parallel group of this rank alone: layers are built, run, saved whole.

    Core looks that group up in many functions, some of them called within a forward pass.
    """
    state: Any = parallel_state
    group = state._TENSOR_MODEL_PARALLEL_GROUP
    # There is a context-parallel group of every rank by itself: sequences are not cut here.
    state._TENSOR_MODEL_PARALLEL_GROUP = state.get_context_parallel_group()
    try:
        yield
    finally:
        state._TENSOR_MODEL_PARALLEL_GROUP = group


def config_alone(config: TransformerConfig) -> TransformerConfig:
    """Copy a configuration, for layers whole on one rank: no sequence parallelism, no fused or delayed gradients."""
    config = copy(config)
    config.tensor_model_parallel_size = 1
    config.sequence_parallel = False
    config.gradient_accumulation_fusion = False
    config.delay_wgrad_compute = False
    return config
