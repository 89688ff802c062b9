"""Asynchronous saves (--async-save), written by a process per rank during training: fixes to Megatron 0.19.

1. Tensors in host memory are copied first: the writer shares that memory, and training would change it meanwhile.
   Without CUDA these are all tensors; with CUDA, the step counters of torch's own Adam.
2. The writer ends with its rank. Otherwise it would wait at its queue for ever after the rank is killed.
3. The writer is a new interpreter that uses a device at once; unpickling `write` first imports our stand-in for CUDA.
"""

import multiprocessing
import os
import queue
from multiprocessing.managers import SyncManager
from typing import Any

from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async

from omnibal_ext.launch.processes import exit_with_parent, kill_with_parent

_LOOP = async_utils.PersistentAsyncCaller.async_loop
_PREPARE = filesystem_async.FileSystemWriterAsync.prepare_write_data


def install(asynchronous: bool) -> None:
    """Patch Megatron's writer of saves and its queue of results."""
    filesystem_async._results_queue = _results_queue(asynchronous)
    if asynchronous:
        async_utils.PersistentAsyncCaller.async_loop = staticmethod(write)
        filesystem_async.FileSystemWriterAsync.prepare_write_data = _prepare_copies


def write(*arguments: Any) -> None:
    """The main function of a rank's writer process."""
    exit_with_parent()
    _LOOP(*arguments)


def _prepare_copies(self: Any, *arguments: Any) -> None:
    _PREPARE(self, *arguments)
    self.write_buckets = [
        (path, key, (content, [(item, tensor.clone() if tensor.is_cpu else tensor) for item, tensor in tensors]))
        for path, key, (content, tensors) in self.write_buckets
    ]


def _results_queue(asynchronous: bool) -> Any:
    """Return the writer's queue of results; its process ends with this rank, while Megatron's outlives a killed one."""
    if not asynchronous:
        return queue.SimpleQueue()  # without --async-save this process writes
    manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
    manager.start(kill_with_parent, (os.getpid(),))
    return manager.Queue()
