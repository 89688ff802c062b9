"""What layers draw by chance: every pack and link anew, and under sequence parallelism."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.vlm.microbatch import Microbatch


def begin_draws(seed: int, batch: Microbatch, link: int) -> None:
    """Let what a link draws for a pack follow from the seed, the iteration, the pack and the link's place in the chain.

    So no layout, schedule, resume or evaluation changes it, nor that an iteration is run again, or a tower beside the
    pipeline encodes the pack elsewhere. Tensor-parallel ranks draw alike; core adds their rank where they hold other
    parts.
    """
    place = batch.shard.team_rank if batch.shard else 0
    (own,) = np.random.SeedSequence((seed, batch.iteration, batch.pack + 1, place, link)).generate_state(1)
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
