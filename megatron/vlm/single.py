"""Megatron without its training loop, for tools: on this process, or on those that torchrun started."""

import contextlib
import io
import logging
import os
from collections.abc import Iterator, Sequence

import torch
from megatron.training.initialize import initialize_megatron
from megatron.training.log_handler import CustomHandler
from megatron.training.training import destroy_global_state
from torch.distributed.elastic.utils.distributed import get_free_port

from megatron.vlm.arguments import TrainingInputs, parse_arguments


@contextlib.contextmanager
def single_process(preset: str, flags: Sequence[str]) -> Iterator[TrainingInputs]:
    """Initialise Megatron for `preset` and `flags`. Its output is dropped, and logs go to stderr: stdout is the tool's.

    At a normal exit Megatron's global state is destroyed, so that it can be initialised again. After an error there is
    no barrier: other ranks may wait for this one until torchrun ends them.
    """
    logging.root.handlers = [handler for handler in logging.root.handlers if not isinstance(handler, CustomHandler)]
    set_single_rank()
    words = [*flags, "--no-check-for-nan-in-loss-and-grad", "--lr", "0", "--train-iters", "1"]
    with _quiet():
        inputs = parse_arguments(["--model", preset, *words, "--global-batch-size", os.environ["WORLD_SIZE"]])
        initialize_megatron()
        yield inputs
        torch.distributed.barrier()
        destroy_global_state()
        torch.distributed.destroy_process_group()


def set_single_rank() -> None:
    """Set the environment of a single rank with a free port, where torchrun has not set it."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", str(get_free_port()))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)
