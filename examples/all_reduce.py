"""Add tensors over all ranks, and say how fast: whether the machines of a run reach each other, before the first run.

    torchrun --nproc-per-node 8 examples/all_reduce.py
    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 examples/all_reduce.py

Every rank adds its number; a sum that is wrong ends with exit code 1. "bus" is what each link carries, 2 (n - 1) / n of
a tensor for n ranks (NCCL's tests count so): it is to be near the slowest link's speed for the largest tensors.
"""

import os
import sys
import time

import torch
from torch import distributed

MEBIBYTES, REPEATS = (1, 16, 256, 1024), 5


def main() -> None:
    """Add, check, and print a line for each size on the first rank."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for size in MEBIBYTES:
        tensor = torch.full((size * 2**18,), float(rank), device=device)
        distributed.all_reduce(tensor)
        if not (tensor == ranks * (ranks - 1) / 2).all():
            print(f"error: rank {rank}: the sum of {size} MiB is wrong", file=sys.stderr)
            sys.exit(1)
        wait(device)
        begin = time.perf_counter()
        for _ in range(REPEATS):
            distributed.all_reduce(tensor)
        wait(device)
        seconds = (time.perf_counter() - begin) / REPEATS
        if rank == 0:
            bus = 2 * (ranks - 1) / ranks * size * 2**20 / seconds / 1e9
            print(f"{ranks} ranks, {size:5d} MiB: {seconds * 1e3:9.2f} ms, bus {bus:7.2f} GB/s", flush=True)
    distributed.destroy_process_group()


def wait(device: str) -> None:
    """Wait for the device and for all ranks."""
    if device == "cuda":
        torch.cuda.synchronize()
    distributed.barrier()


if __name__ == "__main__":
    main()
