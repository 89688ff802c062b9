"""What layers draw by chance: every iteration anew, and under sequence parallelism."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer


def begin_draws(seed: int, iteration: int) -> None:
    """Let what layers draw from here on follow from the seed, the iteration and this rank's place, and nothing before.

    So a resume, an evaluation, or an iteration that is run again draws as if there had been none. Megatron's saves hold
    the state of one data-parallel rank of all, and these draw for packs of different shapes. Tensor-parallel ranks
    draw alike; core adds their rank where they hold other parts.
    """
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    (own,) = np.random.SeedSequence((seed, iteration, *place)).generate_state(1)
    tensor_parallel.model_parallel_cuda_manual_seed(int(own))


@contextmanager
def streams_kept() -> Iterator[None]:
    """All generators are afterwards as they were before."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states, host, device = tracker.get_states(), torch.get_rng_state(), torch.cuda.get_rng_state()
    try:
        yield
    finally:
        tracker.set_states(states)
        torch.cuda.set_rng_state(device)
        torch.set_rng_state(host)


@contextmanager
def draws_of(*place: int) -> Iterator[None]:
    """Inside, what layers draw follows from `place` alone, and outside nothing of it is seen."""
    with streams_kept():
        (own,) = np.random.SeedSequence(place).generate_state(1)
        tensor_parallel.model_parallel_cuda_manual_seed(int(own))
        yield


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
