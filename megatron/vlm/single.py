"""Megatron on this process alone, or on the processes torchrun started, without its training loop: for tools."""

import contextlib
import io
import logging
import os
import socket
from collections.abc import Iterator, Sequence

import torch
from megatron.training.initialize import initialize_megatron

from megatron.vlm.arguments import TrainingInputs, parse_arguments


@contextlib.contextmanager
def single_process(preset: str, flags: Sequence[str]) -> Iterator[TrainingInputs]:
    """Initialise Megatron for `preset` and the flags; its own messages are left out, so that stdout is the tool's."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(_free_port()))
    words = ["--preset", preset, *flags, "--no-check-for-nan-in-loss-and-grad"]
    words += ["--lr", "0", "--train-iters", "1", "--global-batch-size", os.environ["WORLD_SIZE"]]
    logging.disable(logging.WARNING)
    with contextlib.redirect_stdout(io.StringIO()):
        inputs = parse_arguments(words)
        initialize_megatron()
        try:
            yield inputs
        finally:
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]
