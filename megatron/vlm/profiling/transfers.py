"""Measures pipeline transfers and data-parallel all-reduces between two ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.vlm.pipeline.communicator import ACTIVATION, GRADIENT, Communicator
from megatron.vlm.profiling.stopwatch import Run, Stopwatch, Timer

TRANSFER_BYTES = 2**22
REDUCTION_BYTES = 2**24


@dataclass(frozen=True)
class TransferCosts:
    """Seconds of transfers between two ranks; zeros if there is only one rank."""

    transfer_latency_seconds: float = 0.0
    transfer_seconds_per_byte: float = 0.0
    reduction_seconds_per_byte: float = 0.0
    """For an all-reduce between two ranks; a ring of d ranks takes 2 (d - 1) / d times as long."""


def measure_transfers(stopwatch: Stopwatch) -> TransferCosts:
    """Measure between every rank of the first half and its partner in the second, all pairs at once; collective.

    With two nodes this is the network between them, with one the links inside it. A round trip of 4 bytes is twice the
    latency; one of `TRANSFER_BYTES` is twice the latency and the transfer.
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
    """Return a run of two exchanges that times the second; the first one synchronises the ranks."""
    timer = Timer()
    return lambda: timer(exchange, exchange)[1:]


def _there_and_back(ring: Communicator, tensor: torch.Tensor, first: bool) -> None:
    """Send an activation and receive a gradient, on the channels of training."""
    shape = tuple(tensor.shape)
    if first:
        ring.send(ACTIVATION, tensor, 1)
        ring.receive(GRADIENT, shape, tensor.dtype, 1).wait()
    else:
        ring.receive(ACTIVATION, shape, tensor.dtype, 0).wait()
        ring.send(GRADIENT, tensor, 0)
    ring.finish()
