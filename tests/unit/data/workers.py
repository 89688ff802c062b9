"""What a worker process says of itself; it imports what it must, as a program of a user's own does."""

import os
import sys

from megatron.vlm.microbatch import Microbatch


class Worker:
    """Stands for a dataset: a microbatch that says by which process it was read, whose child that is, and whether there
    are GPUs or what is for them."""

    reads_media = True

    def __getitem__(self, _: int) -> Microbatch:
        from megatron.vlm import platform

        gpus = platform.HAS_CUDA or os.environ.get("CUDA_VISIBLE_DEVICES") != ""
        there = ("megatron.vlm.data.loader" in sys.modules, gpus)
        return Microbatch(lengths=tuple(map(int, there)), samples=os.getpid(), useful_tokens=os.getppid())
