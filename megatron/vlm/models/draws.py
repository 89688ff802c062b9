"""Seeds of dropout and drop path: set for every pack and layer, and under sequence parallelism for every rank."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.vlm.microbatch import Microbatch


def begin_draws(seed: int, batch: Microbatch, layer: int) -> None:
    """Seed the generators for one layer and pack from --seed, the iteration, the pack and the layer's index in the
    chain.

    So the masks do not depend on layout, schedule, resumes, evaluations or reruns of an iteration, nor on which rank
    of a replicated tower encodes the pack. Tensor-parallel ranks get the same seed; core adds their rank where they
    hold different shards.
    """
    team_rank = batch.shard.team_rank if batch.shard else 0
    (own,) = np.random.SeedSequence((seed, batch.iteration, batch.pack + 1, team_rank, layer)).generate_state(1)
    tensor_parallel.model_parallel_cuda_manual_seed(int(own))


@contextmanager
def streams_kept() -> Iterator[None]:
    """Make a context at whose end all random generators have the state that they had at its start."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    states, host, device = tracker.get_states(), torch.get_rng_state(), torch.cuda.get_rng_state()
    try:
        yield
    finally:
        tracker.set_states(states)
        torch.cuda.set_rng_state(device)
        torch.set_rng_state(host)


def own_draws(layer: TransformerLayer) -> AbstractContextManager[None]:
    """Return a context for a layer's forward in which, under sequence parallelism, each rank draws its own dropout.

    Core forks its generators once around all layers; here around each, inside the function that may be recomputed.
    """
    config = layer.config
    draws = layer.training and (config.hidden_dropout or config.attention_dropout)
    if not (draws and config.sequence_parallel):
        return nullcontext()
    own: AbstractContextManager[None] = tensor_parallel.get_cuda_rng_tracker().fork()
    return own
