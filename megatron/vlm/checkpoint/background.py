"""Saves that a process beside each rank writes while it trains (--async-save), mended where Megatron's go wrong (0.19).

1. What lies in the host's memory is copied: the writer shares it, and would write what training has made of it since.
   There lies everything where there is no CUDA, and elsewhere the steps of torch's own Adam.
2. The writer ends with its rank. It waits at a queue that never ends, and would outlive a rank that was killed.
3. It is a fresh interpreter, and takes a device before it has what stands in for one; unpickling `write` brings that.
"""

import multiprocessing
import os
import queue
from multiprocessing.managers import SyncManager
from typing import Any

from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async

from omnibal_ext.parent_watch import exit_with_parent, kill_with_parent

_LOOP = async_utils.PersistentAsyncCaller.async_loop
_PREPARE = filesystem_async.FileSystemWriterAsync.prepare_write_data


def install(asynchronous: bool) -> None:
    """Mend the writer of saves, and give it a queue of ours for its answers."""
    filesystem_async._results_queue = _results_queue(asynchronous)
    if asynchronous:
        async_utils.PersistentAsyncCaller.async_loop = staticmethod(write)
        filesystem_async.FileSystemWriterAsync.prepare_write_data = _prepare_copies


def write(*arguments: Any) -> None:
    """What the process beside a rank does."""
    exit_with_parent()
    _LOOP(*arguments)


def _prepare_copies(self: Any, *arguments: Any) -> None:
    _PREPARE(self, *arguments)
    self.write_buckets = [
        (path, key, (content, [(item, tensor.clone() if tensor.is_cpu else tensor) for item, tensor in tensors]))
        for path, key, (content, tensors) in self.write_buckets
    ]


def _results_queue(asynchronous: bool) -> Any:
    """By which the writer of a save says that it is done. The process that keeps Megatron's outlives killed ranks."""
    if not asynchronous:
        return queue.SimpleQueue()  # the writer is this process
    manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
    manager.start(kill_with_parent, (os.getpid(),))
    return manager.Queue()
