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

from megatron.vlm.arguments import TrainingInputs, parse_arguments
from omnibal_ext.launch.loopback import HOST, loopback_store, stay_on_this_machine


@contextlib.contextmanager
def single_process(preset: str, flags: Sequence[str]) -> Iterator[TrainingInputs]:
    """Make a context with Megatron initialised for `preset` and `flags`. Its output is dropped, logs go to stderr.

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
    """Set the environment of a single rank, where torchrun has not set it, with a store on this machine alone."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    if "MASTER_PORT" in os.environ and not _own:
        return
    stay_on_this_machine()
    _own[:] = [loopback_store()]
    # As under torchrun: the rank is a client of a store that is there, else torch opens one on all addresses.
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ.update({"MASTER_ADDR": HOST, "MASTER_PORT": str(_own[0].port), **agent})


_own: list[torch.distributed.TCPStore] = []
"""The store of a rank that torchrun has not started; a new one each time."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)
