"""E and V, the forward and backward of a replicated tower: its tokens to the first stage, their gradients back.

    E    take the rank's images and sounds of the pack, run the tower, send the tokens
    F    of the first stage: receive from all ranks that encoded, put tokens into the pack's order
    B    of the first stage: send every rank the gradient of its tokens
    V    receive it, add the gradients of the tower's weights to the sums

A frozen tower runs one iteration ahead: E encodes the next iteration's pack, and images that are missing of this one
(in the first iteration of a run, or one that is rerun) are encoded first.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron.vlm.data.arrival import Arrivals
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.communicator import IMAGE_GRADIENT, IMAGE_TOKENS, Communicator, Receive
from megatron.vlm.pipeline.iteration import Iteration
from megatron.vlm.pipeline.token_rows import EncoderRows, TokenRows
from megatron.vlm.pipeline.tower import Tower
from omnibal_ext.chain import modality_of
from omnibal_ext.image_assignment import Pieces, assign_pieces, encoding_ranks_of, piece_costs
from omnibal_ext.modalities.encoder import Encoder
from omnibal_ext.schedules.actions import Action
from omnibal_ext.schedules.program import Post


@dataclass(frozen=True)
class ToEncode:
    """Images and sounds that this rank encodes in an iteration, and the iteration's number."""

    packs: Iterator[Microbatch]
    """This rank's share of every microbatch, in the order in which E takes them; it may be empty. For a tower that runs
    ahead: what has not been encoded of this iteration, then the next one's."""
    iteration: int = 0


@dataclass
class Encoded:
    """State of one iteration's encoding on this rank, from the packs read to the tokens that the first stage takes."""

    iteration: int
    arrivals: Arrivals
    taken: int = 0
    """Number of packs taken so far."""
    shares: dict[int, Microbatch] = field(default_factory=dict)
    """Packs by microbatch, before this rank encodes them."""
    rows: dict[int, TokenRows] = field(default_factory=dict)
    """Order of tokens by microbatch, until nothing more of it is received."""
    tokens: dict[tuple[int, int], Receive] = field(default_factory=dict)
    """Tokens on the first stage's rank, by microbatch and the pipeline rank that encoded them."""


class Encoding:
    """E and V (forward and backward of a replicated tower) on one rank, for a whole run. An iteration calls `take`,
    `begin`, `encode` for what is missing, `go_on`, the actions of its list, `end`."""

    def __init__(self, tower: Tower, communicator: Communicator, first: int) -> None:
        """Prepare a run; `first` is the pipeline rank of the first stage."""
        self.tower, self.communicator, self.first = tower, communicator, first
        self.here, self.group = communicator.here, parallel_state.get_tensor_model_parallel_group()
        self.flights: dict[int, Tensor] = {}
        """Image tokens by microbatch, from E to V."""
        self.gradients: dict[int, Receive] = {}
        self.training = self.is_ahead = False
        self.microbatches = 0
        self.images = ToEncode(iter(()))
        self._now = self._coming = self._fresh(0)
        """What F uses of this iteration, and what E fills: the same, or with a tower that runs ahead the next one's."""
        self._next: Encoded | None = None
        """The next training iteration, if it has been encoded."""

    def take(self, images: ToEncode, microbatches: int, training: bool) -> None:
        """Set what the next iteration encodes on this rank, its number of microbatches, and whether it trains."""
        self.images, self.microbatches, self.training = images, microbatches, training
        self.is_ahead = training and self.tower.plan.mode == "ahead"

    def begin(self) -> bool:
        """Bring the tower's weights up to date and begin the iteration; collective over the replica. Return whether its
        images must be encoded first, as a tower that runs ahead has not done so in the iteration before."""
        self.tower.refresh()
        missing = self.is_ahead and self._next is None
        self._now = self._coming = (self.is_ahead and self._next) or self._fresh(self.images.iteration)
        return missing

    def go_on(self) -> None:
        """Have a tower that runs ahead encode the next iteration's images from now on; others go on with this one's.
        Called between missing images and the list."""
        if self.is_ahead:
            self._drain()
            self._coming = self._fresh(self.images.iteration + 1)

    def end(self) -> None:
        """End the iteration: read the packs that are left and, if trained, reduce the tower's gradients to the ranks
        that own its weights; collective over the replica."""
        self._drain()
        if self.is_ahead:
            self._next = self._coming
        if self.training and self.tower.trained:
            self.tower.reduce()
            self.tower.is_stale = True

    def forget(self) -> None:
        """Drop the next iteration's encoded images: this one is rerun, and both are encoded again."""
        self._next = None

    def encode(self, microbatch: int, watch: Callable[[], AbstractContextManager[Any]]) -> None:
        """Run E: encode this rank's share of a microbatch, if it has any, and send the tokens to the first stage.
        `watch()` makes a context around the computing."""
        made = self._coming
        self._expect(made, microbatch)
        share = made.shares.pop(microbatch)
        has_any = any(one.amount for one in share.media.values())
        with watch():
            tokens = self.tower.encode(share, self.training, self._trains) if has_any else None
        if tokens is not None:
            if self.here == self.first:
                made.tokens[microbatch, self.here] = Receive(tokens.detach(), None)
            else:
                self.communicator.send(IMAGE_TOKENS, tokens, self.first)
            if self._trains:
                self.flights[microbatch] = tokens
        made.arrivals.look_ahead()

    def post_tokens(self, microbatch: int, source: int) -> None:
        """Start receiving a microbatch's image tokens from pipeline rank `source`; called on the first stage's rank."""
        made = self._coming
        self._expect(made, microbatch)
        rows, share = made.rows[microbatch], self._encoding_ranks(microbatch).index(source)
        shape, dtype = (rows.count(share, self.group.rank()), 1, self._width), self.tower.chain.language.params_dtype
        receive = self.communicator.receive(IMAGE_TOKENS, shape, dtype, source)
        made.tokens[microbatch, source] = receive

    def assembled(self, microbatch: int) -> Tensor:
        """Return the first stage's input [rows, 1, width]: tokens of all ranks that encoded, in the pack's order; waits
        for them. Collective over tensor-parallel ranks."""
        rows, ranks = self._now.rows[microbatch], self._encoding_ranks(microbatch)
        receives = [self._now.tokens.pop((microbatch, rank), None) for rank in ranks]
        pieces = [self._arrived(receive) for receive in receives if receive is not None]
        if not self._trains:
            del self._now.rows[microbatch]
        return rows.assemble(pieces or [self._no_tokens()], self.group)

    def give_back(self, microbatch: int, gradient: Tensor) -> None:
        """Send each rank that encoded its tokens' rows of `gradient`, the gradient of the first stage's input."""
        rows = self._now.rows.pop(microbatch)
        for number, rank in enumerate(self._encoding_ranks(microbatch)):
            piece = rows.piece(gradient, number, self.group.rank())
            if rank == self.here:
                self.gradients[microbatch] = Receive(piece, None)
            else:
                self.communicator.send(IMAGE_GRADIENT, piece, rank)

    def post_gradient(self, microbatch: int) -> None:
        """Start receiving the gradient of the tokens that this rank encoded of a microbatch, if any."""
        if microbatch in self.flights:
            shape, dtype = self.flights[microbatch].shape, self.tower.chain.language.params_dtype
            self.gradients[microbatch] = self.communicator.receive(IMAGE_GRADIENT, shape, dtype, self.first)

    def backward(self, microbatch: int, watch: Callable[[], AbstractContextManager[Any]]) -> None:
        """Run V: the tower's backward for a microbatch, if this rank encoded any of it. `watch()` makes a context
        around the computing."""
        receive, tokens = self.gradients.pop(microbatch, None), self.flights.pop(microbatch, None)
        gradient = None if receive is None else self._arrived(receive)
        with watch():
            if tokens is not None and gradient is not None:
                self.tower.backward(tokens, gradient)

    @property
    def _trains(self) -> bool:
        return self.training and self.tower.trained

    @property
    def _width(self) -> int:
        """Width of the rows that the tower's last layer gives."""
        chain = self.tower.chain
        return chain.width_behind(modality_of(chain.kinds[self.tower.plan.layers - 1]))

    def _no_tokens(self) -> Tensor:
        return torch.empty(0, 1, self._width, dtype=self.tower.chain.language.params_dtype, device="cuda")

    def _fresh(self, iteration: int) -> Encoded:
        return Encoded(iteration, Arrivals(self.images.packs, self.microbatches, sends=False))

    def _encoding_ranks(self, microbatch: int) -> tuple[int, ...]:
        return encoding_ranks_of(self.tower.plan.encoding_ranks, microbatch)

    def _expect(self, made: Encoded, microbatch: int) -> None:
        """Read packs up to that of `microbatch`, and compute which rank encodes which of their images and sounds."""
        while made.taken <= microbatch:
            pack, number, architecture = next(made.arrivals), made.taken, self.tower.chain.architecture
            ranks, tensor_ranks = self._encoding_ranks(number), self.group.size()
            encoders = {one.modality.size: one for one in architecture.encoders}
            pieces = {size: one.pieces for size, one in pack.media.items()}
            workers = assign_pieces(piece_costs(pieces, self.tower.plan.rates), number, ranks, tensor_ranks)
            made.rows[number] = TokenRows(
                tuple(_rows_of(found, encoders[size]) for size, found in pieces.items()),
                workers,
                len(ranks),
                tensor_ranks,
            )
            if self.here in ranks:
                made.shares[number] = replace(pack, iteration=made.iteration)
            made.taken += 1

    def _drain(self) -> None:
        """Read what is left of the iteration being encoded: in the stream the next iteration's packs come behind it."""
        if self.microbatches:
            self._expect(self._coming, self.microbatches - 1)

    def _arrived(self, receive: Receive) -> Tensor:
        with self.communicator.progress.waiting(receive.message or "what this rank made"):
            return receive.wait()


def _rows_of(pieces: Pieces, encoder: Encoder) -> EncoderRows:
    return EncoderRows(tuple(sum(map(encoder.tokens, piece)) for piece in pieces), encoder.features.streams)


@dataclass(eq=False, kw_only=True)
class TowerIteration(Iteration):
    """An iteration whose first stage takes image tokens from `Encoding`.

    The owners of the tower's weights have their gradients after the list; their reductions are the last.
    """

    encoding: Encoding
    missing: Sequence[Action | Post] = ()
    """Actions that encode this iteration's images, if a tower that runs ahead has not."""

    @property
    def compute(self) -> dict[str, Callable[[Action], None]]:
        """Functions that run one action, by its kind; also of E and V, the tower's forward and backward."""
        encode, backward = self.encoding.encode, self.encoding.backward
        return super().compute | {
            "E": lambda action: encode(action.microbatch, partial(self.watch, action)),
            "V": lambda action: backward(action.microbatch, partial(self.watch, action)),
        }

    def _begin(self) -> None:
        self.gathers.await_weights([weight for chunk in self.chunks for weight in chunk.stage.owned_weights])
        if self.encoding.begin():
            self._walk(self.missing)
        self.encoding.go_on()

    def _finish(self) -> None:
        """Finish sends, then give the tower's gradients to the ranks that own its weights. With W in the list, these
        ranks start their data-parallel reductions only then."""
        super()._finish()
        self.communicator.progress.at("the sums of the tower's gradients")
        owner = self.chunks[0]
        with owner.no_sync() if self.split else nullcontext():
            self.encoding.end()
        if self.split and owner.overlaps and owner.stage.owned:
            owner.module.start_grad_sync()

    def _post_receive(self, post: Post) -> None:
        if post.giver[1].kind == "E":
            self.encoding.post_tokens(post.action.microbatch, post.giver[0])
        elif post.action.kind == "V":
            self.encoding.post_gradient(post.action.microbatch)
        else:
            super()._post_receive(post)

    def _received(self, action: Action) -> Tensor | None:
        if action.kind == "F" and self._takes_images(action):
            return self.encoding.assembled(action.microbatch)
        return super()._received(action)

    def _hand_on(self, action: Action, tensor: Tensor) -> None:
        if action.kind == "B" and self._takes_images(action):
            self.encoding.give_back(action.microbatch, tensor)
        else:
            super()._hand_on(action, tensor)

    def _takes_images(self, action: Action) -> bool:
        return self.chunks[action.chunk].stage.first == self.encoding.tower.plan.layers
