"""Asynchronous saves (--async-save), written by a process per rank during training: fixes to Megatron 0.19.

1. Tensors in host memory are copied first: the writer shares that memory, and training would change it meanwhile.
   Without CUDA these are all tensors; with CUDA, the step counters of torch's own Adam.
2. The writer ends with its rank. Otherwise it would wait at its queue for ever after the rank is killed.
3. The writer is a new interpreter that uses a device at once; unpickling `write` first imports our stand-in for CUDA.
4. A writer that has ended, or whose queue has, fails its save: core would wait for it for ever. `renew` starts another.
5. The reason of a failed write reaches the rank: core would drop it.
"""

import multiprocessing
import os
import queue
import sys
import threading
import time
from multiprocessing.managers import SyncManager
from typing import Any

from megatron.core.dist_checkpointing.strategies import async_utils, filesystem_async
from torch.distributed.checkpoint.api import _wrap_exception

from omnibal_ext.launch.processes import exit_with_parent, kill_with_parent
from omnibal_ext.output import say

_Writer, _Caller = filesystem_async.FileSystemWriterAsync, async_utils.PersistentAsyncCaller
_LOOP, _START = _Caller.async_loop, _Caller._get_process
_IS_DONE, _CLOSE = _Caller.is_current_async_call_done, _Caller.close
_PREPARE, _WRITE, _RESULTS = _Writer.prepare_write_data, _Writer.write_preloaded_data, _Writer.retrieve_write_results
LOST = -1
"""Stands for the number of a request whose writer has ended."""
POLL_SECONDS = 0.1


def install(asynchronous: bool) -> None:
    """Replace Megatron's writer of saves and its queue of results by fixed ones."""
    filesystem_async._results_queue = _results_queue(asynchronous)
    _Writer.write_preloaded_data = staticmethod(_write_or_raise)
    if asynchronous:
        _Caller.async_loop = staticmethod(write)
        _Caller.is_current_async_call_done, _Caller.close = _is_done, _close
        _Caller._get_process = classmethod(_start)
        _Writer.prepare_write_data, _Writer.retrieve_write_results = _prepare_copies, _results


def write(*arguments: Any) -> None:
    """Run a rank's writer process: it writes saves until the rank ends."""
    exit_with_parent()
    _Writer.write_preloaded_data = staticmethod(_write_or_raise)
    try:
        _LOOP(*arguments)
    except Exception as error:
        say(f"warning: the process that writes the saves of rank {arguments[0]} has ended: {error!r}", error=True)
        sys.exit(1)


def renew() -> None:
    """Close a writer process that has ended, for the next save to start one; replace a lost queue of results."""
    if _has_ended(_Caller._persistent_process):
        caller = async_utils.AsyncCallsQueue._persistent_caller or _Caller()
        caller.process = _Caller._persistent_process
        caller.close(abort=True)
    try:
        filesystem_async._results_queue.empty()
    except (OSError, EOFError):
        filesystem_async._results_queue = _results_queue(asynchronous=True)


def _has_ended(process: Any) -> bool:
    return process is not None and not process.is_alive()


def _is_done(self: Any, blocking: bool = False, no_dist: bool = False) -> bool:
    """Say whether all ranks' writers are done with the present request, or have ended."""
    while True:
        if _has_ended(self.process) and self.cur_item is None:
            self.cur_item = LOST
        if _IS_DONE(self, False, no_dist):
            return True
        if not blocking:
            return False
        time.sleep(POLL_SECONDS)


def _close(self: Any, abort: bool = False) -> None:
    """Close as core's function; a writer that has ended is not waited for, now or when the rank ends."""
    if ended := _has_ended(self.process):
        for requests in (_Caller._persistent_queue, _Caller._persistent_preload_q):
            requests.cancel_join_thread()
    _CLOSE(self, abort or ended)


def _start(cls: Any, *arguments: Any, **named: Any) -> Any:
    process = _START.__func__(cls, *arguments, **named)
    if not isinstance(cls._persistent_preload_q, _Preloading):
        cls._persistent_preload_q = _Preloading(cls._persistent_preload_q, process)
    return process


class _Preloading:
    """A rank's end of the queue with which it waits until the writer has copied its tensors."""

    def __init__(self, requests: Any, process: Any) -> None:
        self._requests, self._process = requests, process

    def put(self, number: int) -> None:
        self._requests.put(number)

    def cancel_join_thread(self) -> None:
        self._requests.cancel_join_thread()

    def join(self) -> None:
        """Wait for the copies, or for the writer's end."""
        waiting = threading.Thread(target=self._requests.join, daemon=True)
        waiting.start()
        while waiting.is_alive() and self._process.is_alive():
            waiting.join(POLL_SECONDS)


def _write_or_raise(*arguments: Any, **named: Any) -> Any:
    """Write as core's function; outside of its threads raise the error that it returns, whose words core keeps."""
    written = _WRITE(*arguments, **named)
    if named["results_queue"] is None and isinstance(written[1], Exception):
        raise written[1]
    return written


def _results(self: Any) -> Any:
    """Return results as core's function; an error of the queue, or the writer's end, is one of this rank's write."""
    try:
        found = _RESULTS(self)
    except (OSError, EOFError) as error:
        return _wrap_exception(error)
    if isinstance(found, tuple) and _has_ended(_Caller._persistent_process):
        return _wrap_exception(RuntimeError("the process that writes its saves has ended"))
    return found


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
