"""What data-parallel ranks exchange beside computing: in one order on all of them, whatever their packs are.

Messages of a group are matched by their order alone. A rank whose pack has no tiles passes vision links by: it does not
touch their weights in forward order, and their gradients are ready in another order than a backward pass yields them.

    gathers        --overlap-param-gather   all start with the iteration, those of the weights used first in front
    reductions     --overlap-grad-reduce    a bucket's starts once it is ready and those of all buckets before it have

Weights of dealt experts (--expert-model-parallel-size) have buckets of their own, which fewer ranks share. They stand
among the others: two groups of ranks that start in different orders can wait for each other too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import torch


def start_gathers(module: Any) -> None:
    """Let the weights of a wrapped stage come from the ranks that updated them."""
    for bucket in reversed(module.bucket_groups):  # these are in backward order
        bucket.start_param_sync()


def finish_gathers(module: Any) -> None:
    """Compute from here on with weights that have come; layers do so for their own when they are run."""
    for bucket in reversed(module.bucket_groups):
        bucket.finish_param_sync(skip_next_bucket_dispatch=True)


class OrderedReductions:
    """Holds the reductions of wrapped stages to the order of their buckets."""

    def __init__(self) -> None:
        self._attached: WeakSet[torch.nn.Module] = WeakSet()

    def attach(self, module: Any) -> None:
        """From here on the buckets of a wrapped stage are reduced in their order; once each."""
        if module in self._attached:
            return
        self._attached.add(module)
        _put_in_one_order(module)
        turns = _Turns([bucket.start_grad_sync for bucket in module.bucket_groups])
        for place, bucket in enumerate(module.bucket_groups):
            bucket.start_grad_sync = partial(turns.ready, place)  # called where its last gradient comes


def _put_in_one_order(module: Any) -> None:
    """Sort all buckets as a backward pass is done with them: with the first of its weights last.

    Core walks through both its lists, one behind the other, and asks of none what is in it.
    """
    place = {weight: number for number, weight in enumerate(module.parameters())}

    def first(group: Any) -> int:
        return min(place[weight] for bucket in group.buckets for weight in bucket.params_list)

    groups = [*module.bucket_groups, *module.expert_parallel_bucket_groups]
    module.bucket_groups, module.expert_parallel_bucket_groups = sorted(groups, key=first, reverse=True), []


class _Turns:
    """Calls each of `starts` when it is ready and those before it have been called; then it goes round again."""

    def __init__(self, starts: list[Callable[..., None]]) -> None:
        self.starts = starts
        self.turn = 0
        self.waiting: dict[int, Callable[[], None]] = {}

    def ready(self, place: int, *arguments: Any, **options: Any) -> None:
        """Call `starts[place]`, now or when its turn comes."""
        self.waiting[place] = partial(self.starts[place], *arguments, **options)
        while self.turn in self.waiting:
            self.waiting.pop(self.turn)()
            self.turn = (self.turn + 1) % len(self.starts)
