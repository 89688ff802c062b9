"""Executor of a schedule: the patched `forward_backward_func` of Megatron.

Schedules are data (`omnibal_ext.schedules.schedule`). The executor runs its rank's list of actions; computing, loss and
scaling are core's `forward_step` and `backward_step`.
"""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config
from megatron.training import get_args, training
from torch import Tensor

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.communicator import Communicator
from megatron.vlm.pipeline.data_parallel import OrderedReductions
from megatron.vlm.pipeline.encoding import Encoding, ToEncode, TowerIteration
from megatron.vlm.pipeline.iteration import Chunk, Forward, Iteration, Watch
from megatron.vlm.pipeline.tied import reduce_tied_embedding
from megatron.vlm.pipeline.tower import Tower
from megatron.vlm.pipeline.weight_gradients import WeightGradients
from omnibal_ext.errors import UserError
from omnibal_ext.image_assignment import encoding_ranks_of
from omnibal_ext.plan_tower import Tower as TowerPlan
from omnibal_ext.schedules.actions import Action, Beside, Schedule, check_packs, counts_of, has_weight_gradients
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import Post, Postings, with_posts
from omnibal_ext.schedules.schedule import build_schedule, placement_of
from omnibal_ext.schedules.weaving import with_encoding


def install(executor: Callable[..., Any]) -> None:
    """Make Megatron's training and evaluation loops call `executor` for each iteration, by a patch."""
    training.get_forward_backward_func = lambda *_, **__: executor


def open_channels(
    groups: ProcessGroupCollection, edges: Sequence[tuple[int, int]], image_edges: Sequence[tuple[int, int]] = ()
) -> Communicator:
    """Open channels along (source, target) pairs of pipeline ranks, with the timeout of --distributed-timeout-minutes;
    collective over the job."""
    return Communicator(groups.pp, edges, timedelta(minutes=get_args().distributed_timeout_minutes), image_edges)


def image_edges(ranks: int, first: int) -> list[tuple[int, int]]:
    """Return (source, target) pairs from every other pipeline rank to `first`, the rank of the first stage."""
    return [(rank, first) for rank in range(ranks) if rank != first]


class Executor:
    """A callable with the arguments of core's forward_backward functions. One communicator serves all iterations.

    `watch(action)` is a context around the computing of every action, for measurements. `lists` are a plan's own; for
    other numbers of microbatches, those of `schedule_name` are built. `tower` is the plan's replicated tower.
    """

    def __init__(
        self,
        schedule_name: str = "1f1b",
        watch: Watch = lambda _: contextlib.nullcontext(),
        lists: Schedule | None = None,
        tower: TowerPlan | None = None,
    ) -> None:
        self.schedule_name, self.watch, self.tower = schedule_name, watch, tower
        self.lists = {} if lists is None else {counts_of(lists): lists}
        self.weight_gradients, self.reductions = WeightGradients(), OrderedReductions()
        self.encoding: Encoding | None = None
        """E and V of the run; None before its first iteration."""
        self._communicator: Communicator | None = None
        self._postings: dict[tuple[int, int, int], Postings] = {}
        self._in_time_postings: dict[tuple[int, int, int], Postings] = {}

    def __call__(
        self, *, forward_step_func: Callable[..., Any], data_iterator: Any, model: Any, num_microbatches: int,
        forward_only: bool = False, first_val_step: bool | None = None,
        pg_collection: ProcessGroupCollection | None = None, force_all_reduce: bool = False,
        images: ToEncode | None = None, **_: Any,
    ) -> list[Any]:  # fmt: skip
        """Run one iteration: forwards and backwards of `num_microbatches` packs, then the reduction of gradients.

        Returns the loss records of the last stage's microbatches, elsewhere an empty list. Core's arguments about
        shapes are ignored: shapes follow from the packs. `images` are those that this rank encodes, with a replicated
        tower. Raises UserError for a schedule that loses work or would deadlock.
        """
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        modules = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(modules)
        config, records = get_model_config(modules[0]), list[Any]()
        chunks = [Chunk(module, iterator, config) for module, iterator in zip(modules, iterators, strict=True)]
        placement = placement_of(self.schedule_name, groups.pp.size(), len(chunks))
        steps = self._schedule(placement, num_microbatches, chunks, forward_only)[groups.pp.rank()]
        for chunk in chunks:
            if chunk.overlaps:
                self.reductions.attach(chunk.module)
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)

        def forward(chunk: Chunk, pack: Microbatch, entering: Tensor | None, microbatch: int) -> tuple[Tensor, Tensor]:
            first = schedules.check_first_val_step(first_val_step, forward_only, microbatch == 0)
            result: tuple[Tensor, Tensor] = schedules.forward_step(
                forward_step_func, iter([pack]), chunk.module, num_microbatches, entering, records, config,
                groups.cp.size(), is_first_microbatch=first, current_microbatch=microbatch,
                is_last_stage=chunk.stage.post_process,
            )  # fmt: skip
            return result

        iteration = self._iteration(groups, placement, chunks, forward)
        if isinstance(iteration, TowerIteration):
            assert images is not None
            iteration.encoding.take(images, num_microbatches, training=not forward_only)
            iteration.missing = self._missing(placement, num_microbatches)
        iteration.run([step for step in steps if step.kind in "EF"] if forward_only else steps)
        if not forward_only and config.finalize_model_grads_func is not None:
            divisor = iteration.normaliser if config.calculate_per_token_loss else None
            config.finalize_model_grads_func(modules, divisor, pg_collection=groups, force_all_reduce=force_all_reduce)
            reduce_tied_embedding(modules, groups)
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return records

    @property
    def copies(self) -> list[torch.nn.Module]:
        """Modules that run here besides the stages: the copy of a replicated tower."""
        return [] if self.encoding is None else [self.encoding.tower.copies]

    def forget_images(self, training: bool) -> None:
        """Drop images that a tower encoded ahead, before a training iteration is rerun."""
        if self.encoding is not None and training:
            self.encoding.forget()

    def _iteration(
        self, groups: ProcessGroupCollection, placement: Placement, chunks: list[Chunk], forward: Forward
    ) -> Iteration:
        """Make the state of an iteration; the first call opens all channels, and makes the copies of a tower."""
        first = placement.ranks_of[0]
        edges = image_edges(placement.ranks, first) if self.tower else []
        self._communicator = self._communicator or open_channels(groups, placement.edges, edges)
        common = self._communicator, placement, chunks, forward, self.weight_gradients, self.watch
        if self.tower is None:
            return Iteration(*common)
        stage = chunks[0].stage
        self.encoding = self.encoding or Encoding(Tower(stage.chain, self.tower, stage), self._communicator, first)
        return TowerIteration(*common, encoding=self.encoding)

    def _schedule(
        self, placement: Placement, num_microbatches: int, chunks: Sequence[Chunk], forward_only: bool
    ) -> Postings:
        """Return the lists of all ranks, with receives where they are posted; made and checked once for each number of
        microbatches. If weight gradients are actions of their own (W), linear layers are patched to leave them."""
        key = (placement.ranks, num_microbatches, placement.chunks)
        if self.tower is not None and forward_only:
            return self._in_time(placement, num_microbatches)
        if key not in self._postings:
            schedule = self.lists.get(key) or self._built(*key)
            self._postings[key] = with_posts(schedule, num_microbatches, placement)
            check_packs(schedule, placement.chunks)
            for chunk in chunks if has_weight_gradients(schedule) else ():
                self.weight_gradients.attach(chunk.stage)
        return self._postings[key]

    def _built(self, ranks: int, microbatches: int, chunks: int) -> Schedule:
        """Build the lists of `schedule_name` for a number of microbatches that the plan has none for. Raises UserError
        with a replicated tower: the planner alone decides when it encodes."""
        if self.tower is None:
            return build_schedule(self.schedule_name, ranks, microbatches, chunks)
        raise UserError(
            f"the plan has lists for {next(iter(self.lists))[1]} microbatches with its tower beside the pipeline, the "
            f"run has {microbatches}; plan again with omnibal plan --num-microbatches {microbatches}"
        )

    def _in_time(self, placement: Placement, num_microbatches: int) -> Postings:
        """Return lists in which a replicated tower encodes a microbatch (E) shortly before its forward (F), for any
        number of them: for evaluations, and for images that were not encoded ahead."""
        assert self.tower is not None
        key = (placement.ranks, num_microbatches, placement.chunks)
        if key not in self._in_time_postings:
            beside = Beside(
                tuple(encoding_ranks_of(self.tower.encoding_ranks, number) for number in range(num_microbatches))
            )
            lists = with_encoding(build_schedule(self.schedule_name, *key), beside)
            self._in_time_postings[key] = with_posts(lists, num_microbatches, placement)
        return self._in_time_postings[key]

    def _missing(self, placement: Placement, num_microbatches: int) -> list[Action | Post]:
        """Return actions that encode all images of an iteration on this rank; [] unless the tower runs ahead."""
        assert self.tower is not None
        assert self._communicator is not None
        if self.tower.mode != "ahead":
            return []
        steps = self._in_time(placement, num_microbatches)[self._communicator.here]
        return [step for step in steps if (step.giver[1] if isinstance(step, Post) else step).kind == "E"]
