"""Arrival of packs on the device: uint8 pixels, mel frames in pinned memory, copied while the pack before is computed.

    worker process       decode and cut images: uint8; decode sounds: fp32 mel frames
    host                 pinned memory, one pack ahead of the device
    device               copied on a stream of its own, broadcast to the tensor-parallel ranks, normalised

One rank of each tensor-parallel group decodes images and sounds, the costliest work on the CPU, and broadcasts them:
pixels as uint8, a quarter of the bytes of normalised float32 pixels.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.microbatch import Microbatch


class Arrivals:
    """The packs of one iteration on one stage, in order, on this rank's device.

    `look_ahead` waits for the reader's next pack and starts its copy: called after the device was given the pack
    before, so that the device has work meanwhile. `next` gives it: later kernels wait for the copy, the host does not.
    What its encoders read is broadcast (`with_values`), a collective in the schedule's order, if `sends`.
    """

    def __init__(self, packs: Iterator[Microbatch], count: int, sends: bool = True) -> None:
        self.packs, self.left, self.sends = packs, count, sends
        self.copied: Microbatch | None = None

    def look_ahead(self) -> None:
        """Start copying the next pack, unless there is none in this iteration or it is being copied."""
        if self.left and self.copied is None:
            self.left, pack = self.left - 1, next(self.packs)
            with platform.beside_computing("copying"):
                self.copied = to_device(pack)

    def __iter__(self) -> Iterator[Microbatch]:
        return self

    def __next__(self) -> Microbatch:
        self.look_ahead()
        if self.copied is None:
            raise StopIteration
        pack, self.copied = self.copied, None
        platform.wait_for("copying")
        pack.with_tensors(platform.used_here)  # for what it notes; what it makes is not needed
        return with_values(pack) if self.sends else pack


def to_device(pack: Microbatch) -> Microbatch:
    """Copy the pack's tensors to this rank's device; copies may still be running."""
    return pack.with_tensors(lambda tensor: tensor.to("cuda", non_blocking=True))


def with_values(pack: Microbatch) -> Microbatch:
    """Return the pack with normalised pixels and mels for its encoders. Collective over the tensor-parallel group."""
    return replace(pack, media={size: one.arrived(_sent) for size, one in pack.media.items()})


def _sent(read: Tensor) -> Tensor:
    """Broadcast a tensor from the tensor-parallel group's first rank; return it. Others give a meta tensor.
    Collective."""
    group = parallel_state.get_tensor_model_parallel_group()
    if read.is_meta:
        read = torch.empty(read.shape, dtype=read.dtype, device="cuda")
    if group.size() > 1 and read.numel():
        dist.broadcast(read, dist.get_global_rank(group, 0), group=group)
    return read
