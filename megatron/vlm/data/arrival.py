"""How packs get to the device: bytes in pinned memory, copied while the pack before is computed.

    worker process       decode, cut, lay out: bytes, eight bits a colour
    host                 pinned memory, a pack ahead of the device
    device               copied beside computing, shared with the tensor-parallel ranks, normalised

Images are decoded by one rank of each tensor-parallel group, which shares the bytes: whole packs of full-width numbers
would be four times as many, and decoding takes more of a core than all else that a rank does.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.data.pixels import normalise
from megatron.vlm.microbatch import Microbatch


class Arrivals:
    """The packs of one iteration on one stage, in order, on this rank's device.

    1. `look_ahead` reads the next pack, which waits for the one who reads, and starts to copy it. It is called when the
       device has been given the pack before to compute, and so has work meanwhile.
    2. `next` gives a pack that has been copied: what is computed from then on waits for the copy, the host does not.
    3. Pixels are shared by the tensor-parallel ranks and normalised there, in the order of the schedule: these ranks
       talk in between, and must do so in one order.

    Tensors come from the host, as `PackDataset` lays them out; what is on the device already stays as it is. Without
    `normalises` pixels stay as they came, this rank's alone: who computes with them does that (`with_pixels`).
    """

    def __init__(self, packs: Iterator[Microbatch], count: int, normalises: bool = True) -> None:
        self.packs, self.left, self.normalises = packs, count, normalises
        self.copied: deque[Microbatch] = deque()

    def look_ahead(self) -> None:
        """Start to bring the next pack, unless there is none in this iteration or it is on its way."""
        if self.left and not self.copied:
            self.left -= 1
            pack = next(self.packs)
            with platform.beside_computing("copying"):
                self.copied.append(to_device(pack))

    def __iter__(self) -> Iterator[Microbatch]:
        return self

    def __next__(self) -> Microbatch:
        self.look_ahead()
        if not self.copied:
            raise StopIteration
        pack = self.copied.popleft()
        platform.wait_for("copying")
        for tensor in tensors(pack).values():
            platform.used_here(tensor)
        return with_pixels(pack) if self.normalises else pack


def tensors(pack: Microbatch) -> dict[str, Tensor]:
    """Those of a pack, by their names, but for one that only says what another rank will bring."""
    found: dict[str, Any] = vars(pack)
    return {name: value for name, value in found.items() if isinstance(value, Tensor) and not value.is_meta}


def to_device(pack: Microbatch) -> Microbatch:
    """The same pack with its tensors on this rank's device, or on their way there."""
    moved: dict[str, Any] = {name: tensor.to("cuda", non_blocking=True) for name, tensor in tensors(pack).items()}
    return replace(pack, **moved)


def with_pixels(pack: Microbatch) -> Microbatch:
    """The same pack with pixels as the model takes them, if they came as bytes; all tensor-parallel ranks together."""
    if pack.pixels is None or pack.pixel_statistics is None:
        return pack
    pixels = normalise(_shared(pack.pixels), pack.pixel_statistics)
    return replace(pack, pixels=pixels, pixel_statistics=None)


def _shared(tiles: Tensor) -> Tensor:
    """The tiles of the tensor-parallel group's first rank; the others know their shape from the pack's sizes."""
    group = parallel_state.get_tensor_model_parallel_group()
    if tiles.is_meta:
        tiles = torch.empty(tiles.shape, dtype=tiles.dtype, device="cuda")
    if group.size() > 1 and tiles.numel():
        dist.broadcast(tiles, dist.get_global_rank(group, 0), group=group)
    return tiles
