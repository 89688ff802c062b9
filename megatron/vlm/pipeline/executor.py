"""Runs a schedule: the patched `forward_backward_func` of Megatron.

Schedules are data (`omnibal_ext.schedules.schedule`). The executor walks its rank's list and obeys; the computing
itself, the loss and its scaling stay with core's `forward_step` and `backward_step`.
"""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from megatron.training import get_args, training
from torch import Tensor

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.communicator import Communicator
from megatron.vlm.pipeline.data_parallel import OrderedReductions
from megatron.vlm.pipeline.iteration import Chunk, Iteration, Watch
from megatron.vlm.pipeline.tied import reduce_tied_embedding
from megatron.vlm.pipeline.weight_gradients import WeightGradients
from omnibal_ext.schedules.actions import Schedule, check_packs, counts_of, has_weight_gradients
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.posting import Postings, with_posts
from omnibal_ext.schedules.schedule import build_schedule, placement_of


def install(executor: Callable[..., Any]) -> None:
    """Make Megatron's training and evaluation loops run `executor`."""
    training.get_forward_backward_func = lambda *_, **__: executor


def open_channels(groups: ProcessGroupCollection, edges: Sequence[tuple[int, int]]) -> Communicator:
    """The channels of a run along these edges of pipeline ranks, with the time limit that the run's flags say."""
    return Communicator(groups.pp, edges, timedelta(minutes=get_args().distributed_timeout_minutes))


class Executor:
    """Callable as core's forward_backward functions are. One communicator serves all iterations.

    `watch(action)` is a context entered around the computing of every action, for those who measure. `lists` are a
    plan's own; for other numbers of microbatches than theirs, the lists are those of `schedule_name`.
    """

    def __init__(
        self,
        schedule_name: str = "1f1b",
        watch: Watch = lambda _: contextlib.nullcontext(),
        lists: Schedule | None = None,
    ) -> None:
        self.schedule_name = schedule_name
        self.lists = {} if lists is None else {counts_of(lists): lists}
        self.watch = watch
        self.weight_gradients = WeightGradients()
        self.reductions = OrderedReductions()
        self._communicator: Communicator | None = None
        self._postings: dict[tuple[int, int, int], Postings] = {}

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool = False,
        **_: Any,
    ) -> list[Any]:
        """One iteration: forwards and backwards of `num_microbatches` packs, then the reduction of gradients.

        Returns the loss records of the last stage's microbatches, elsewhere an empty list. Shapes, peers and order come
        from the schedule and the packs; core's arguments about sequence lengths and shapes are not needed.
        Raises UserError for a schedule that loses work or would deadlock.
        """
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        modules = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(modules)
        config = get_model_config(modules[0])
        chunks = [Chunk(module, iterator, config) for module, iterator in zip(modules, iterators, strict=True)]
        placement = placement_of(self.schedule_name, groups.pp.size(), len(chunks))
        postings = self._schedule(placement, num_microbatches, chunks)
        for chunk in chunks:
            if chunk.overlaps:
                self.reductions.attach(chunk.module)
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)

        records: list[Any] = []

        def forward(chunk: Chunk, pack: Microbatch, entering: Tensor | None, microbatch: int) -> tuple[Tensor, Tensor]:
            result: tuple[Tensor, Tensor] = schedules.forward_step(
                forward_step_func,
                iter([pack]),
                chunk.module,
                num_microbatches,
                entering,
                records,
                config,
                cp_group_size=groups.cp.size(),
                collect_non_loss_data=collect_non_loss_data,
                is_first_microbatch=schedules.check_first_val_step(first_val_step, forward_only, microbatch == 0),
                current_microbatch=microbatch,
                is_last_stage=chunk.stage.post_process,
            )
            return result

        self._communicator = self._communicator or open_channels(groups, placement.edges)
        iteration = Iteration(self._communicator, placement, chunks, forward, self.weight_gradients, self.watch)
        steps = postings[groups.pp.rank()]
        iteration.run([step for step in steps if step.kind == "F"] if forward_only else steps)
        if not forward_only:
            _finalize(modules, iteration.normaliser, groups, force_all_reduce)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return records

    def _schedule(self, placement: Placement, num_microbatches: int, chunks: Sequence[Chunk]) -> Postings:
        """The lists for these counts, checked once; linear layers are readied where they split the backward."""
        key = (placement.ranks, num_microbatches, placement.chunks)
        if key not in self._postings:
            schedule = self.lists.get(key) or build_schedule(self.schedule_name, *key)
            postings = with_posts(schedule, num_microbatches, placement)
            check_packs(schedule, placement.chunks)
            if has_weight_gradients(schedule):
                for chunk in chunks:
                    self.weight_gradients.attach(chunk.stage)
            self._postings[key] = postings
        return self._postings[key]


def _finalize(modules: list[Any], normaliser: Tensor, groups: ProcessGroupCollection, force_all_reduce: bool) -> None:
    """Reduce the gradients over ranks and divide them by the global batch's normaliser."""
    config = get_model_config(modules[0])
    if config.finalize_model_grads_func is None:
        return
    config.finalize_model_grads_func(
        modules,
        normaliser if config.calculate_per_token_loss else None,
        pg_collection=groups,
        force_all_reduce=force_all_reduce,
    )
    reduce_tied_embedding(modules, groups)
