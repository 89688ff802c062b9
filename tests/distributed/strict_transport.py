"""Run under torchrun: cases over a transport as strict as NCCL's worst, ended by every rank.

strict_transport.py parity LAUNCH ANSWERS [flag...]      one iteration
strict_transport.py training LAUNCH ANSWERS [flag...]    a few optimizer steps
strict_transport.py beside LAUNCH ANSWERS [flag...]      two iterations with the tower beside the pipeline
strict_transport.py steps_beside LAUNCH ANSWERS [flag...]    a few optimizer steps with it

Gloo forgives what hangs on a GPU. Here a send is not done before its receive is posted, and at random moments (before
and after every action, before every message) a rank waits for all that it has posted, as a device synchronisation does:
messages of the pipeline both ways, reductions of gradients and gathers of weights. A gathered weight is no number until
someone waits for it.
"""

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import param_and_grad_buffer
from torch import Tensor

from megatron.vlm.pipeline.communicator import Communicator, Receive
from megatron.vlm.pipeline.executor import Executor
from omnibal_ext.schedules.actions import Action
from tests.distributed import beside, beside_cases, beside_training, cases, harness, parity, training

PATIENCE = timedelta(seconds=60)


class Once:
    """Work that may be waited for by several: gloo's own hangs the second time."""

    def __init__(self, work: dist.Work) -> None:
        self.work, self.done = work, False

    def wait(self) -> None:
        if not self.done:
            self.work.wait()
            self.done = True

    def is_completed(self) -> bool:
        return self.done


class StrictCommunicator(Communicator):
    """A communicator whose sends wait for their receives, and whose rank synchronises now and then."""

    def __init__(self, group: dist.ProcessGroup, image_edges: list[tuple[int, int]], seed: int) -> None:
        edges = harness.edges(group.size())
        super().__init__(group, edges, PATIENCE, image_edges)
        self.answers = Communicator(group, edges, PATIENCE, image_edges).channels
        """Beside each channel one on which its receiver says that it has posted."""
        self.posted: list[Once] = []
        self.generator = random.Random(seed * 1000 + dist.get_rank())
        self.sources = {id(channel): edge for edge, channel in self.channels.items()}

    def perhaps_synchronise(self) -> None:
        """Wait, at every other moment, for everything that was posted."""
        if self.generator.random() < 0.5:
            for work in self.posted:
                work.wait()
            self.posted.clear()

    def _send(self, tensor: Tensor, target: int, channel: dist.ProcessGroup) -> None:
        self.perhaps_synchronise()
        super()._send(tensor, target, channel)
        if tensor.numel():
            answer = dist.irecv(torch.empty(1), target, group=self.answers[self.sources[id(channel)]])
            send = self.pending[-1]
            send.work = Once(send.work)
            self.posted += [Once(answer), send.work]

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, channel: dist.ProcessGroup) -> Receive:
        self.perhaps_synchronise()
        receive = super()._receive(shape, dtype, source, channel)
        if receive.work is not None:
            answer = dist.isend(torch.zeros(1), source, group=self.answers[self.sources[id(channel)]])
            receive.work = Once(receive.work)
            self.posted += [receive.work, Once(answer)]
        return receive


class Gathers(Once):
    def __init__(self, work: dist.Work, results: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(work)
        self.results = results

    def wait(self) -> None:
        super().wait()
        while self.results:
            weights, result = self.results.pop()
            weights.copy_(result)


def post_collectives(posted: list[Once]) -> None:
    """Have the reductions and gathers that core starts beside computing waited for like messages."""
    original, gather = param_and_grad_buffer._coalescing_manager, param_and_grad_buffer.dist_all_gather_func
    results: list[tuple[Tensor, Tensor]] = []

    def gather_beside(weights: Tensor, own: Tensor, async_op: bool, **options: Any) -> Any:
        if not async_op:
            return gather(weights, own, async_op=async_op, **options)
        result, kept = torch.empty_like(weights), own.clone()
        weights.fill_(math.nan)
        own.copy_(kept)
        results.append((weights, result))
        return gather(result, kept, async_op=async_op, **options)

    @contextlib.contextmanager
    def manager(*arguments: Any, **options: Any) -> Iterator[Any]:
        with original(*arguments, **options) as started:
            yield started
        started.works = [Gathers(work, results.copy()) for work in started.works]
        results.clear()
        posted.extend(started.works)

    param_and_grad_buffer._coalescing_manager = manager
    param_and_grad_buffer.dist_all_gather_func = gather_beside


LAUNCHES: dict[str, Mapping[str, Any]] = {
    "parity": cases.STRICT, "training": cases.TRAINING, "beside": beside_cases.LAUNCHES,
    "steps_beside": beside_cases.LAUNCHES,
}  # fmt: skip


def main() -> None:
    what, name, path, *flags = sys.argv[1:]
    launch = LAUNCHES[what][name]
    harness.start(harness.SMALL, launch.tensor, launch.pipeline, flags, experts=getattr(launch, "experts", 1))
    answers = harness.Answers(path)
    group = parallel_state.get_pipeline_model_parallel_group()
    image_edges = beside.edges_of_images(launch.pipeline) if "beside" in what else []
    communicator = StrictCommunicator(group, image_edges, launch.seed)
    post_collectives(communicator.posted)

    @contextlib.contextmanager
    def watch(_: Action) -> Iterator[None]:
        communicator.perhaps_synchronise()
        yield
        communicator.perhaps_synchronise()

    make = partial(Executor, watch=watch)
    difference: Callable[[Any], float] = {
        "parity": partial(parity.difference, answers=answers, pipeline=launch.pipeline,
                          make_executor=harness.executors(communicator, watch=watch)),
        "training": partial(training.difference, answers=answers, pipeline=launch.pipeline,
                            make_executor=harness.executors(communicator, watch=watch)),
        "beside": partial(beside.difference, answers=answers, pipeline=launch.pipeline, communicator=communicator,
                          executor_of=make),
        "steps_beside": partial(beside_training.worst, answers=answers, communicator=communicator, executor_of=make),
    }[what]  # fmt: skip
    found = beside_training.QUESTIONS if what == "steps_beside" else launch.cases()
    harness.report({str(case): difference(case) for case in found})
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
