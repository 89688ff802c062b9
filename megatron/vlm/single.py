"""Megatron on this process alone, or on the processes torchrun started, without its training loop: for tools."""

import contextlib
import io
import logging
import os
import socket
from collections.abc import Iterator, Sequence

import torch
from megatron.training.initialize import initialize_megatron
from megatron.training.log_handler import CustomHandler
from megatron.training.training import destroy_global_state

from megatron.vlm.arguments import TrainingInputs, parse_arguments


@contextlib.contextmanager
def single_process(preset: str, flags: Sequence[str]) -> Iterator[TrainingInputs]:
    """Initialise Megatron for `preset` and the flags; its own messages are left out, so that stdout is the tool's.

    So is what other libraries log, which Megatron's handler would print there: from now on it goes to stderr.

    Left in order, Megatron is as before and can be initialised again. Left by an error, nothing is waited for: other
    ranks may be waiting for this one, and torchrun ends them once it has failed.
    """
    logging.root.handlers = [handler for handler in logging.root.handlers if not isinstance(handler, CustomHandler)]
    alone_unless_told()
    words = [*flags, "--no-check-for-nan-in-loss-and-grad", "--lr", "0", "--train-iters", "1"]
    with _quiet():
        inputs = parse_arguments(["--model", preset, *words, "--global-batch-size", os.environ["WORLD_SIZE"]])
        initialize_megatron()
        yield inputs
        torch.distributed.barrier()
        destroy_global_state()
        torch.distributed.destroy_process_group()


def alone_unless_told() -> None:
    """One rank of one, with a port of its own, where torchrun has said nothing else."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(_free_port()))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]
