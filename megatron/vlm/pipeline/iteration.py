"""One iteration on one rank: walks the list of actions, moves tensors in and out, keeps what the backward needs."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron.vlm.data.arrival import Arrivals
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.communicator import Communicator, Receive
from megatron.vlm.pipeline.data_parallel import Gathers
from megatron.vlm.pipeline.encoding import Encoding
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.pipeline.weight_gradients import Late, WeightGradients, accumulate
from omnibal_ext.schedules.actions import Action, takers
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.posting import Post

Watch = Callable[[Action], contextlib.AbstractContextManager[Any]]


@dataclass
class Chunk:
    """One stage of this rank as Megatron wrapped it, and where its packs come from."""

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
        """Whether the data-parallel reduction runs beside the backward pass (`--overlap-grad-reduce`)."""
        return self.config.no_sync_func is not None

    @property
    def gathers(self) -> bool:
        """Whether the weights are gathered beside the forward passes (`--overlap-param-gather`)."""
        return self.config.param_sync_func is not None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Gradients that are ready inside do not start the reduction."""
        context: contextlib.AbstractContextManager[None] = (
            self.module.no_sync() if self.overlaps else contextlib.nullcontext()
        )
        return context


@dataclass
class Flight:
    """A microbatch on one stage, from its forward to its last action."""

    entering: Tensor | None
    output: Tensor | None
    output_shape: torch.Size
    late: list[Late] = field(default_factory=list)


class Iteration:
    """The state of one iteration on one rank.

    1. Where the optimizer left each weight on one data-parallel rank, weights are gathered in one order on all ranks.
       Links wait for their own; a pack without tiles passes links by, and its stage waits for all first. So do those
       of ranks that exchange something inside the forward pass: one may have no tiles, and would wait for the others.
    2. Receives are posted where the list says (`omnibal_ext.schedules.posting`): they travel while other actions
       are computed.
    3. F: take the pack and the input, compute, hand the output on; meanwhile the next pack is copied to the device.
    4. B: take the output's gradient, compute, hand the input's gradient back. Where nothing up to the stage is trained,
       there is nothing to do, and nothing comes or goes.
    5. W: compute the weights' gradients that B put aside.
    6. The data-parallel reduction of a chunk runs beside its last backward, or follows its last W.
    7. E and V are of a tower beside the pipeline (`pipeline.encoding`), from which the first stage's F takes what
       enters. Its owners have the gradients when the list is through; their reductions are the last.
    """

    def __init__(
        self,
        communicator: Communicator,
        placement: Placement,
        chunks: Sequence[Chunk],
        forward: Callable[[Chunk, Microbatch, Tensor | None, int], tuple[Tensor, Tensor]],
        weight_gradients: WeightGradients,
        watch: Watch,
        encoding: Encoding | None = None,
    ) -> None:
        """`forward(chunk, pack, input, microbatch)` gives the output, and the loss's normaliser on the last stage."""
        self.communicator, self.placement, self.chunks, self.forward = communicator, placement, chunks, forward
        self.rank = communicator.here
        self.weight_gradients, self.watch, self.encoding = weight_gradients, watch, encoding
        self.arrivals: list[Arrivals] = []
        self.packs: dict[Action, Microbatch] = {}
        self.receives: dict[Action, Receive] = {}
        self.flights: dict[tuple[int, int], Flight] = {}
        self.last: set[Action] = set()
        self.split = False
        self.normaliser = torch.zeros([], dtype=torch.float32, device="cuda")

    def run(self, steps: Sequence[Action | Post], missing: Sequence[Action | Post] = ()) -> None:
        """Obey the list. Without backwards in it nothing is kept for them. `missing` encodes what a tower that runs
        ahead has not."""
        actions = [step for step in steps if isinstance(step, Action)]
        self.split = any(action.kind == "W" for action in actions)
        self.last = set({a.chunk: a for a in actions if a.kind == ("W" if self.split else "B")}.values())
        forwards = Counter(action.chunk for action in actions if action.kind == "F")
        self.arrivals = [Arrivals(chunk.packs, forwards[number]) for number, chunk in enumerate(self.chunks)]
        gathered = [chunk.module for chunk in self.chunks if chunk.gathers and self.last]  # an evaluation's are whole
        self.gathers = Gathers(gathered, self.communicator.progress.waiting)
        if self.encoding is not None:
            self.gathers.await_weights([weight for chunk in self.chunks for weight in chunk.stage.owned_weights])
            if self.encoding.begin():
                self._walk(missing)
            self.encoding.go_on()
        self._walk(steps)
        self.communicator.progress.at("the sends after the last action")
        self.communicator.finish()
        if self.encoding is not None:
            self._end_encoding(self.encoding)
        self.communicator.progress.at(
            "what follows the schedule: reductions, the optimizer's step, a save, an evaluation"
        )

    def _walk(self, steps: Sequence[Action | Post]) -> None:
        compute = {"F": self._forward, "B": self._backward, "W": self._weight_gradients}
        compute |= {"E": self._encode, "V": self._encode_backward}
        for step in steps:
            if isinstance(step, Post):
                self._post_receive(step)
            else:
                self.communicator.progress.action(step)
                compute[step.kind](step)

    def _encode(self, action: Action) -> None:
        assert self.encoding is not None
        self.encoding.encode(action.microbatch, partial(self.watch, action))

    def _encode_backward(self, action: Action) -> None:
        assert self.encoding is not None
        self.encoding.backward(action.microbatch, partial(self.watch, action))

    def _end_encoding(self, encoding: Encoding) -> None:
        """Give the tower's owners their gradients; where W start reductions, their stage's have waited for it."""
        self.communicator.progress.at("the sums of the tower's gradients")
        owner = self.chunks[0]
        with owner.no_sync() if self.split else contextlib.nullcontext():
            encoding.end()
        if self.split and owner.overlaps and owner.stage.owned:
            owner.module.start_grad_sync()

    def _takes_images(self, chunk: Chunk) -> bool:
        """Whether what enters a stage is put together from what ranks have encoded."""
        return self.encoding is not None and chunk.stage.first == self.encoding.tower.plan.links

    def _post_receive(self, post: Post) -> None:
        """Start receiving what an action needs, if anything comes."""
        action, (source, made), communicator = post.action, post.giver, self.communicator
        if self.encoding is not None and made.kind == "E":
            self.encoding.post_tokens(action.microbatch, source)
            return
        if self.encoding is not None and action.kind == "V":
            self.encoding.post_gradient(action.microbatch)
            return
        stage, dtype = self.chunks[action.chunk].stage, self.chunks[action.chunk].config.pipeline_dtype
        if action.kind == "F":
            entering = stage.input_shape(self._pack(action))
            assert entering is not None
            self.receives[action] = communicator.receive_activation(entering, dtype, source)
        elif stage.receives_gradient:
            leaving = self.flights[action.microbatch, action.chunk].output_shape
            self.receives[action] = communicator.receive_gradient(leaving, dtype, source)

    def _hand_on(self, action: Action, tensor: Tensor, send: Callable[[Tensor, int], None]) -> None:
        """Give what `action` made to the stage that takes it: by `send`, or as it is within this rank."""
        ((rank, taking),) = takers(action, self.rank, self.placement)
        if rank == self.rank:
            # Detached, as a message is: the graphs of two stages stay apart. It lives on where the output is released.
            self.receives[taking] = Receive(tensor.detach(), None, "what this rank made")
        else:
            send(tensor, rank)

    def _received(self, action: Action) -> Tensor | None:
        """What came for `action`; None where nothing does."""
        receive = self.receives.pop(action, None)
        if receive is None:
            return None
        with self.communicator.progress.waiting(receive.message):
            return receive.wait()

    def _pack(self, action: Action) -> Microbatch:
        """The pack of a forward, taken when it is first asked for."""
        if action not in self.packs:
            self.packs[action] = next(self.arrivals[action.chunk])
        return self.packs[action]

    def _forward(self, action: Action) -> None:
        chunk, entering = self.chunks[action.chunk], self._received(action)
        if self.encoding is not None and self._takes_images(chunk):
            entering = self.encoding.assembled(action.microbatch)
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
            self._hand_on(action, output, self.communicator.send_activation)
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
            aside = self.weight_gradients.put_aside(flight.late) if self.split else contextlib.nullcontext()
            with self.watch(action), reduces, aside:
                input_gradient = schedules.backward_step(entering, flight.output, gradient, chunk.config)
            if chunk.stage.sends_gradient and self.encoding is not None and self._takes_images(chunk):
                self.encoding.give_back(action.microbatch, input_gradient)
            elif chunk.stage.sends_gradient:
                self._hand_on(action, input_gradient, self.communicator.send_gradient)
        flight.entering = flight.output = None
        if not self.split:
            del self.flights[action.microbatch, action.chunk]

    def _weight_gradients(self, action: Action) -> None:
        chunk, flight = self.chunks[action.chunk], self.flights.pop((action.microbatch, action.chunk))
        with self.watch(action), chunk.no_sync():
            accumulate(flight.late)
        if action in self.last and chunk.overlaps and not chunk.stage.owned:
            chunk.module.start_grad_sync()
