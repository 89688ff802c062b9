"""Data-parallel collectives that overlap computing: started in the same order on all ranks, whatever their packs are.

Collectives of a group are matched by their order. A rank whose pack has no tiles skips the vision layers: it does not
use their weights in forward order, and their gradients are ready in another order than after a backward pass.

    gathers        --overlap-param-gather   a bucket's starts once the one before it has been waited for; over all
                                            stages of a rank, in the order in which weights are used
    reductions     --overlap-grad-reduce    a bucket's starts once it is ready and those of all buckets before it have

Expert-parallel weights (--expert-model-parallel-size) have buckets of their own, over smaller groups. They are ordered
together with the others, since two groups of ranks that start in different orders can deadlock too.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch


class Gathers:
    """All-gathers of the updated weights of a rank's stages; the first starts when this is created.

    Each gather overlaps layers that compute with the weights before it. If all were started at once, on a device with
    one hardware queue these layers would wait for the last gather but one.
    """

    def __init__(self, modules: Sequence[Any], waiting: Callable[[str], AbstractContextManager[None]]) -> None:
        """Start the first gather. `modules`: stages in core's DistributedDataParallel, in the order they run;
        `waiting(message)` makes a context around each wait."""
        self._waiting, self._arrived = waiting, 0
        self._buckets: list[Any] = []
        self._last: dict[Any, int] = {}
        for module in modules:
            self._buckets += reversed(module.bucket_groups)  # these are in backward order
            self._last[module] = len(self._buckets) - 1
        for index, bucket in enumerate(self._buckets):
            bucket.finish_param_sync = partial(self._wait, index)  # called where a layer is about to be run
        self._start()

    def finish(self, module: Any) -> None:
        """Wait until all weights of a stage have been gathered; return at once if it is not among `modules`."""
        self._wait(self._last.get(module, -1))

    def await_weights(self, weights: Collection[torch.nn.Parameter]) -> None:
        """Wait until these weights, and all that are used before them, have been gathered."""
        held = set(weights)
        indices = [
            index
            for index, group in enumerate(self._buckets)
            if any(held & set(bucket.params_list) for bucket in group.buckets)
        ]
        self._wait(max(indices, default=-1))

    def _start(self) -> None:
        if self._arrived < len(self._buckets):
            self._buckets[self._arrived].start_param_sync()

    def _wait(self, index: int, **_: Any) -> None:
        """Wait until bucket `index` and all before it are gathered; each starts when the one before has arrived."""
        while self._arrived <= index:
            bucket = self._buckets[self._arrived]
            del bucket.finish_param_sync  # core's again
            with self._waiting("weights from its data-parallel ranks"):
                bucket.finish_param_sync(skip_next_bucket_dispatch=True)
            self._arrived += 1
            self._start()


class OrderedReductions:
    """A patch that makes core's DistributedDataParallel reduce gradient buckets in one order, the same on all ranks."""

    def __init__(self) -> None:
        self._attached: WeakSet[torch.nn.Module] = WeakSet()

    def attach(self, module: Any) -> None:
        """Have a stage in core's DistributedDataParallel reduce so from now on. Repeated calls have no effect."""
        if module in self._attached:
            return
        self._attached.add(module)
        _put_in_one_order(module)
        turns = _Turns([bucket.start_grad_sync for bucket in module.bucket_groups])
        for index, bucket in enumerate(module.bucket_groups):
            bucket.start_grad_sync = partial(turns.ready, index)  # called where its last gradient comes


def _put_in_one_order(module: Any) -> None:
    """Sort gradient buckets, experts' among the others, by the first of their weights, the last first: as a backward
    fills them.

    Core would reduce them in the order of its list, with experts' behind all others.
    """
    index = {weight: number for number, weight in enumerate(module.parameters())}

    def first(group: Any) -> int:
        return min(index[weight] for bucket in group.buckets for weight in bucket.params_list)

    groups = [*module.bucket_groups, *module.expert_parallel_bucket_groups]
    module.bucket_groups, module.expert_parallel_bucket_groups = sorted(groups, key=first, reverse=True), []


class _Turns:
    """A queue that calls functions in the order of `starts`: each once it is `ready` and all before it were called.
    After the last it begins anew."""

    def __init__(self, starts: list[Callable[..., None]]) -> None:
        self.starts = starts
        self.turn = 0
        self.waiting: dict[int, Callable[[], None]] = {}

    def ready(self, index: int, *arguments: Any, **options: Any) -> None:
        """Call `starts[index]` with these arguments, now or when its turn comes."""
        self.waiting[index] = partial(self.starts[index], *arguments, **options)
        while self.turn in self.waiting:
            self.waiting.pop(self.turn)()
            self.turn = (self.turn + 1) % len(self.starts)
