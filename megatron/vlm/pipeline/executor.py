"""Runs a schedule: the patched `forward_backward_func` of Megatron.

Schedules are data (`omnibal_ext.schedule`). The executor walks its rank's list and obeys; the computing itself, the
loss and its scaling stay with core's `forward_step` and `backward_step`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from megatron.training import training
from torch import Tensor

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.communicator import Communicator, Receive
from omnibal_ext.schedule import Action, build_schedule


def install(executor: Callable[..., Any]) -> None:
    """Make Megatron's training and evaluation loops run `executor`."""
    training.get_forward_backward_func = lambda *_, **__: executor


class Executor:
    """Callable as core's forward_backward functions are. One communicator serves all iterations."""

    def __init__(self, schedule_name: str = "1f1b") -> None:
        self.schedule_name = schedule_name
        self.communicator: Communicator | None = None

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
        """
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        chunks = model if isinstance(model, list) else [model]
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator] * len(chunks)
        if self.communicator is None:
            self.communicator = Communicator(groups.pp)
        schedule = build_schedule(self.schedule_name, groups.pp.size(), num_microbatches, len(chunks))
        actions = [action for action in schedule[groups.pp.rank()] if action.kind == "F" or not forward_only]
        config = get_model_config(chunks[0])
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)

        iteration = Iteration(self.communicator, chunks, iterators, forward_step_func, num_microbatches, groups)
        iteration.forward_only = forward_only
        iteration.collect_non_loss_data = collect_non_loss_data
        iteration.first_val_step = first_val_step
        iteration.run(actions)

        if config.finalize_model_grads_func is not None and not forward_only:
            config.finalize_model_grads_func(
                chunks,
                iteration.total_tokens if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=force_all_reduce,
            )
        if config.timers is not None:
            config.timers("forward-backward").stop()
        return iteration.records


class Iteration:
    """The state of one iteration on one rank.

    1. Before an action is computed, the receive of the next one is posted: it travels meanwhile.
    2. F: take the pack and the input, compute, send the output on.
    3. B: take the output's gradient, compute, send the input's gradient back.
    4. Data-parallel reduction of a chunk may start with its last backward.
    """

    forward_only = False
    collect_non_loss_data = False
    first_val_step: bool | None = None

    def __init__(
        self,
        communicator: Communicator,
        chunks: Sequence[torch.nn.Module],
        iterators: Sequence[Iterator[Microbatch]],
        forward_step_func: Callable[..., Any],
        num_microbatches: int,
        groups: ProcessGroupCollection,
    ) -> None:
        self.communicator, self.chunks, self.iterators = communicator, chunks, iterators
        self.forward_step_func, self.num_microbatches, self.groups = forward_step_func, num_microbatches, groups
        self.config = get_model_config(chunks[0])
        self.first = [get_attr_wrapped_model(chunk, "pre_process") for chunk in chunks]
        self.last = [get_attr_wrapped_model(chunk, "post_process") for chunk in chunks]
        self.batches: dict[Action, Microbatch] = {}
        self.receives: dict[Action, Receive] = {}
        self.in_flight: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.output_shapes: dict[tuple[int, int], torch.Size] = {}
        self.records: list[Any] = []
        self.total_tokens = torch.zeros([], dtype=torch.int, device="cuda")

    def run(self, actions: Sequence[Action]) -> None:
        """Obey the list."""
        last_backward = {action.chunk: action for action in actions if action.kind == "B"}
        with contextlib.ExitStack() as unsynchronised:
            held = [unsynchronised.enter_context(contextlib.ExitStack()) for _ in self.chunks]
            for chunk, no_sync in zip(held, self._no_sync_contexts(), strict=True):
                chunk.enter_context(no_sync)
            for action, following in zip(actions, [*actions[1:], None], strict=True):
                self._post_receive(action)
                if following is not None and self._input_is_ready(following):
                    self._post_receive(following)
                if action.kind == "F":
                    self._forward(action)
                else:
                    if action is last_backward[action.chunk]:
                        held[action.chunk].close()
                    self._backward(action)
        self.communicator.finish()

    def _no_sync_contexts(self) -> list[contextlib.AbstractContextManager[Any]]:
        no_sync = self.config.no_sync_func
        if no_sync is None or self.forward_only:
            return [contextlib.nullcontext() for _ in self.chunks]
        functions = no_sync if isinstance(no_sync, list) else [no_sync]
        return [function() for function in functions]

    def _input_is_ready(self, action: Action) -> bool:
        """Whether the shape of what the action receives is known: a gradient has its output's, once that exists."""
        return action.kind == "F" or (action.microbatch, action.chunk) in self.output_shapes

    def _post_receive(self, action: Action) -> None:
        """Start receiving what `action` needs, unless that has happened."""
        if action in self.receives:
            return
        dtype = self.config.pipeline_dtype
        if action.kind == "F":
            batch = self.batches[action] = next(self.iterators[action.chunk])
            shape = get_attr_wrapped_model(self.chunks[action.chunk], "input_shape")(batch)
            if shape is not None:
                self.receives[action] = self.communicator.receive_activation(shape, dtype)
            else:
                self.receives[action] = Receive(None, None)
        elif self.last[action.chunk]:
            self.receives[action] = Receive(None, None)
        else:
            shape = self.output_shapes[action.microbatch, action.chunk]
            self.receives[action] = self.communicator.receive_gradient(shape, dtype)

    def _forward(self, action: Action) -> None:
        input_tensor = self.receives.pop(action).wait()
        if input_tensor is not None and not self.forward_only:
            input_tensor.requires_grad_()
        last = self.last[action.chunk]
        output, tokens = schedules.forward_step(
            self.forward_step_func,
            iter([self.batches.pop(action)]),
            self.chunks[action.chunk],
            self.num_microbatches,
            input_tensor,
            self.records,
            self.config,
            cp_group_size=self.groups.cp.size(),
            collect_non_loss_data=self.collect_non_loss_data,
            is_first_microbatch=schedules.check_first_val_step(
                self.first_val_step, self.forward_only, action.microbatch == 0
            ),
            current_microbatch=action.microbatch,
            is_last_stage=last,
        )
        self.total_tokens += tokens
        if not last:
            self.communicator.send_activation(output)
        if not self.forward_only:
            key = (action.microbatch, action.chunk)
            self.output_shapes[key] = output.shape
            self.in_flight[key] = (input_tensor, output)
            schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs and not last)

    def _backward(self, action: Action) -> None:
        gradient = self.receives.pop(action).wait()
        input_tensor, output = self.in_flight.pop((action.microbatch, action.chunk))
        input_gradient = schedules.backward_step(input_tensor, output, gradient, self.config)
        if not self.first[action.chunk]:
            self.communicator.send_gradient(input_gradient)
