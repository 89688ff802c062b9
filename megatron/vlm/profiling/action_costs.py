"""Costs of a run besides its layers, measured: an action's overhead (executor, DDP wrapper, loss, pack boundaries),
pipeline transfers and data-parallel all-reduces between two ranks."""

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.loss import token_loss
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.communicator import ACTIVATION, GRADIENT, Communicator
from megatron.vlm.pipeline.executor import Executor
from megatron.vlm.profiling.stage_pass import StagePass, synthetic_pack, wrapped_stage
from megatron.vlm.profiling.stopwatch import Run, Stopwatch, Timer
from omnibal_ext.architectures.architecture import Architecture

FEW, MANY = (1, 2) if platform.HAS_CUDA else (2, 10)
"""Microbatches of two iterations to compare. Few on a GPU: a sleeping stream queues about a thousand kernels only."""


def measure_actions(args: Namespace, architecture: Architecture, stopwatch: Stopwatch) -> tuple[float, float, float]:
    """Measure what a run adds to its layers' seconds: (of an action, of an iteration, of an action on the host).

    1. Runs a chain with one layer of every kind, on this rank alone, with the smallest packs.
    2. Iterations of few and of many microbatches: the slope is a microbatch, the intercept an iteration.
    3. From a microbatch the same stage's seconds without executor are subtracted; half of the rest is an action.

    Differences are taken within a round of the stopwatch, so that a slower machine affects both runs.
    """
    further, vision, language = (
        tuple(replace(one, layers=1) for one in architecture.further),
        replace(architecture.vision, layers=min(1, architecture.vision.layers), feature_layers=(), side_by_side=()),
        replace(architecture.language, each_layer=architecture.language.each_layer[:1]),
    )
    small = replace(architecture, further=further, vision=vision, language=language)
    chain = Chain.of(args, small)
    model = [wrapped_stage(chain, 0, len(chain.kinds))]
    tiles = small.least_tiles
    tokens = small.image_tokens(tiles) + 1
    tokens += -tokens % args.tensor_model_parallel_size
    pack = synthetic_pack(small, {"tiles": tiles}, [tokens])
    executor = Executor()
    few_timer, many_timer, layers_timer = Timer(), Timer(), Timer()

    def iterate(count: int, timer: Timer) -> float:
        # Copies: a pack caches what it computes for all layers.
        packs = iter([replace(pack) for _ in range(count)])
        (seconds,) = timer(
            lambda: executor(forward_step_func=_forward_step, data_iterator=packs, model=model, num_microbatches=count)
        )
        return seconds

    def run() -> tuple[float, ...]:
        few, many, step = iterate(FEW, few_timer), iterate(MANY, many_timer), StagePass(chain, model[0], pack)
        microbatch = (many - few) / (MANY - FEW)
        return (microbatch - sum(layers_timer(step.forward, step.backward))) / 2, few - FEW * microbatch

    action, iteration = stopwatch.measure({"actions": {"run": run}})["actions"]["run"]
    few, many, layers = (sum(timer.host_seconds) for timer in (few_timer, many_timer, layers_timer))
    return max(0.0, action), max(0.0, iteration), max(0.0, ((many - few) / (MANY - FEW) - layers) / 2)


def _forward_step(packs: Iterator[Microbatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    pack = next(packs)
    return model(pack), partial(token_loss, "token", pack)


TRANSFER_BYTES = 2**22
REDUCTION_BYTES = 2**24


@dataclass(frozen=True)
class TransferCosts:
    """Seconds of transfers between two ranks; zeros if there is only one rank."""

    transfer_latency_seconds: float = 0.0
    transfer_seconds_per_byte: float = 0.0
    reduction_seconds_per_byte: float = 0.0
    """Seconds of an all-reduce between two ranks; a ring of d ranks takes 2 (d - 1) / d times as long."""


def measure_transfers(stopwatch: Stopwatch) -> TransferCosts:
    """Measure transfers between every rank of the first half and its partner in the second, all at once; collective.

    With two nodes this is the network between them, with one the links inside it. A round trip of 4 bytes is twice the
    latency; one of 4 MiB is twice the latency and the transfer. An all-reduce is timed of 16 MiB.
    """
    half, here = dist.get_world_size() // 2, dist.get_rank()
    if not half:
        return TransferCosts()
    pairs = [dist.new_group([rank, rank + half]) for rank in range(half)]
    pair = pairs[here % half]
    ring = Communicator(pair, [(0, 1)])
    small, large = (torch.zeros(size // 4, device="cuda") for size in (4, TRANSFER_BYTES))
    gradients = torch.zeros(REDUCTION_BYTES // 4, device="cuda")
    runs = {
        "small": _second_of_two(lambda: _there_and_back(ring, small, here < half)),
        "large": _second_of_two(lambda: _there_and_back(ring, large, here < half)),
        "reduction": _second_of_two(lambda: dist.all_reduce(gradients, group=pair)),
    }
    seconds = stopwatch.measure({"links": runs})["links"]
    small_seconds, large_seconds, reduction = (seconds[name][0] for name in ("small", "large", "reduction"))
    return TransferCosts(
        small_seconds / 2,
        max(0.0, large_seconds - small_seconds) / 2 / TRANSFER_BYTES,
        reduction / REDUCTION_BYTES,
    )


def _second_of_two(exchange: Callable[[], object]) -> Run:
    """Return a run that makes two exchanges and gives the seconds of the second; the first synchronises the ranks."""
    timer = Timer()
    return lambda: timer(exchange, exchange)[1:]


def _there_and_back(ring: Communicator, tensor: torch.Tensor, first: bool) -> None:
    """Exchange a tensor between two ranks and back, on the channels of training; `first`: this rank sends first."""
    shape = tuple(tensor.shape)
    if first:
        ring.send(ACTIVATION, tensor, 1)
        ring.receive(GRADIENT, shape, tensor.dtype, 1).wait()
    else:
        ring.receive(ACTIVATION, shape, tensor.dtype, 0).wait()
        ring.send(GRADIENT, tensor, 0)
    ring.finish()
