"""One iteration on one rank: it runs the list of actions, sends and receives, and keeps what the backward needs."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron.vlm.data.arrival import Arrivals
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.communicator import ACTIVATION, GRADIENT, Communicator, Receive
from megatron.vlm.pipeline.data_parallel import Gathers
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.pipeline.weight_gradients import Late, WeightGradients, accumulate
from omnibal_ext.schedules.actions import Action, takers
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import Post

Watch = Callable[[Action], contextlib.AbstractContextManager[Any]]
Forward = Callable[["Chunk", Microbatch, Tensor | None, int], tuple[Tensor, Tensor]]
"""Function (chunk, pack, its input, microbatch number) -> output, and the last stage's normaliser."""


@dataclass
class Chunk:
    """One stage of this rank as Megatron wrapped it, and the source of its packs."""

    module: Any  # DistributedDataParallel around a Stage
    packs: Iterator[Microbatch]  # on the host
    config: ModelParallelConfig  # the first chunk's: Megatron's loop sets its functions there alone

    @cached_property
    def stage(self) -> Stage:
        """The stage itself, without the wrappers."""
        stage: Stage = unwrap_model(self.module)
        return stage

    @property
    def overlaps(self) -> bool:
        """Whether the data-parallel reduction overlaps the backward pass (`--overlap-grad-reduce`)."""
        return self.config.no_sync_func is not None

    @property
    def gathers(self) -> bool:
        """Whether gathering the weights overlaps the forward passes (`--overlap-param-gather`)."""
        return self.config.param_sync_func is not None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients do not start the reduction."""
        context: contextlib.AbstractContextManager[None] = (
            self.module.no_sync() if self.overlaps else contextlib.nullcontext()
        )
        return context


@dataclass
class Flight:
    """What is kept of a microbatch on one stage, from its forward to its last action."""

    entering: Tensor | None
    output: Tensor | None
    output_shape: torch.Size
    late: list[Late] = field(default_factory=list)


@dataclass(eq=False)
class Iteration:
    """The state of one iteration on one rank.

    1. With the distributed optimizer, weights are gathered in one order on all ranks. Each layer waits for its own; a
       stage waits for all first if its pack has no tiles, so that it skips layers, or if ranks exchange something
       within the forward pass, where a rank without tiles would make the others wait.
    2. Receives are posted where the list says (`omnibal_ext.schedules.program`), and overlap other actions.
    3. F: take the pack and the input, compute, send the output; meanwhile the next pack is copied to the device.
    4. B: receive the output's gradient, compute, send the input's gradient. Nothing is done or sent if nothing up to
       the stage is trained.
    5. W: compute the weight gradients that B left.
    6. The data-parallel reduction of a chunk overlaps its last B, or follows its last W.
    """

    communicator: Communicator
    placement: Placement
    chunks: Sequence[Chunk]
    forward: Forward
    weight_gradients: WeightGradients
    watch: Watch
    packs: dict[Action, Microbatch] = field(default_factory=dict)
    receives: dict[Action, Receive] = field(default_factory=dict)
    flights: dict[tuple[int, int], Flight] = field(default_factory=dict)

    def run(self, steps: Sequence[Action | Post]) -> None:
        """Run this rank's list of actions and receives; nothing is kept for a backward where it has none."""
        actions = [step for step in steps if isinstance(step, Action)]
        self.split = any(action.kind == "W" for action in actions)
        self.last = set({a.chunk: a for a in actions if a.kind == ("W" if self.split else "B")}.values())
        forwards = Counter(action.chunk for action in actions if action.kind == "F")
        self.arrivals = [Arrivals(chunk.packs, forwards[number]) for number, chunk in enumerate(self.chunks)]
        gathered = [chunk.module for chunk in self.chunks if chunk.gathers and self.last]  # an evaluation's are whole
        self.gathers = Gathers(gathered, self.communicator.progress.waiting)
        self.normaliser = torch.zeros([], dtype=torch.float32, device="cuda")
        self._begin()
        self._walk(steps)
        self._finish()
        self.communicator.progress.at(
            "what follows the schedule: reductions, the optimizer's step, a save, an evaluation"
        )

    def _begin(self) -> None:
        """Do what comes before the list: nothing, unless there is a replicated tower."""

    def _finish(self) -> None:
        """Wait until everything sent has left."""
        self.communicator.progress.at("the sends after the last action")
        self.communicator.finish()

    @property
    def compute(self) -> dict[str, Callable[[Action], None]]:
        """Functions that run one action, by its kind."""
        return {"F": self._forward, "B": self._backward, "W": self._weight_gradients}

    def _walk(self, steps: Sequence[Action | Post]) -> None:
        compute = self.compute
        for step in steps:
            if isinstance(step, Post):
                self._post_receive(step)
            else:
                self.communicator.progress.action(step)
                compute[step.kind](step)

    def _post_receive(self, post: Post) -> None:
        """Start receiving the input of an F, or the gradient of a B's output if anything up to its stage is trained."""
        action, source, chunk = post.action, post.giver[0], self.chunks[post.action.chunk]
        dtype = chunk.config.pipeline_dtype
        if action.kind == "F":
            entering = chunk.stage.input_shape(self._pack(action))
            assert entering is not None
            self.receives[action] = self.communicator.receive(ACTIVATION, entering, dtype, source)
        elif chunk.stage.receives_gradient:
            leaving = self.flights[action.microbatch, action.chunk].output_shape
            self.receives[action] = self.communicator.receive(GRADIENT, leaving, dtype, source)

    def _hand_on(self, action: Action, tensor: Tensor) -> None:
        """Send the result of `action` to the stage that takes it, which may be on this rank too."""
        ((rank, taking),) = takers(action, self.communicator.here, self.placement)
        if rank == self.communicator.here:
            # Detached, as a message is: the graphs of two stages stay apart. It lives on where the output is released.
            self.receives[taking] = Receive(tensor.detach(), None, "what this rank made")
        else:
            self.communicator.send(ACTIVATION if action.kind == "F" else GRADIENT, tensor, rank)

    def _received(self, action: Action) -> Tensor | None:
        """Return the tensor received for `action`, when it has arrived; None if it receives nothing."""
        receive = self.receives.pop(action, None)
        if receive is None:
            return None
        with self.communicator.progress.waiting(receive.message):
            return receive.wait()

    def _pack(self, action: Action) -> Microbatch:
        """Return the pack of a forward, taken from the reader when it is first asked for."""
        if action not in self.packs:
            self.packs[action] = next(self.arrivals[action.chunk])
        return self.packs[action]

    def _forward(self, action: Action) -> None:
        chunk, entering = self.chunks[action.chunk], self._received(action)
        if entering is not None and self.last and chunk.stage.sends_gradient:
            entering.requires_grad_()
        pack = self._pack(action)
        if chunk.stage.gathers_first(pack):
            self.gathers.finish(chunk.module)
        with self.watch(action):
            output, normaliser = self.forward(chunk, pack, entering, action.microbatch)
        self.gathers.finish(chunk.module)  # also of what this pack needed none of: replicas start them all here
        del self.packs[action]
        self.normaliser += normaliser
        if not chunk.stage.post_process:
            self._hand_on(action, output)
        self.arrivals[action.chunk].look_ahead()  # may wait for the one who reads: what is made has left
        if self.last:
            keep = output if chunk.stage.has_backward else None
            self.flights[action.microbatch, action.chunk] = Flight(entering, keep, output.shape)
            free = chunk.config.deallocate_pipeline_outputs and not chunk.stage.post_process
            schedules.deallocate_output_tensor(keep, free)

    def _backward(self, action: Action) -> None:
        chunk, gradient = self.chunks[action.chunk], self._received(action)
        flight = self.flights[action.microbatch, action.chunk]
        if chunk.stage.has_backward:
            entering = flight.entering if chunk.stage.sends_gradient else None
            reduces = contextlib.nullcontext() if action in self.last else chunk.no_sync()
            delays = self.weight_gradients.delaying(flight.late) if self.split else contextlib.nullcontext()
            with self.watch(action), reduces, delays:
                input_gradient = schedules.backward_step(entering, flight.output, gradient, chunk.config)
            if chunk.stage.sends_gradient:
                self._hand_on(action, input_gradient)
        flight.entering = flight.output = None
        if not self.split:
            del self.flights[action.microbatch, action.chunk]

    def _weight_gradients(self, action: Action) -> None:
        chunk, flight = self.chunks[action.chunk], self.flights.pop((action.microbatch, action.chunk))
        with self.watch(action), chunk.no_sync():
            accumulate(flight.late)
        if action in self.last and chunk.overlaps and not chunk.stage.owned:
            chunk.module.start_grad_sync()
