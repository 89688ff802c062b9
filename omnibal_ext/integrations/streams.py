"""Streams (a streamed data set of Hugging Face, a WebDataset, any iterable): packs as samples come, resumed exactly.

stream = PackedStream(samples, vit_budget=12, llm_budget=4096)
loader = StatefulDataLoader(stream, batch_size=None, num_workers=4)   # torchdata's, or torch's DataLoader
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple

from omnibal_ext.integrations.samples import Packer, size_of
from omnibal_ext.integrations.torch_loops import collate
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.in_memory import whole


class Position(NamedTuple):
    """Place in a stream: behind `given` packs of a buffer, which has the samples `waiting` and those from `begin` on.

    To get there samples are read from number `first` on, before which the stream's own state was `state`.
    """

    first: int = 0
    state: Any = None
    waiting: tuple[int, ...] = ()
    begin: int = 0
    given: int = 0


class Held(NamedTuple):
    """A sample that was read, its number, and the stream's own state before it."""

    number: int
    state: Any
    sample: Any


class PackedStream:
    """Yields the packs of one buffer of samples after another, joined; the emptiest waits for the next buffer.

    `state_dict` and `load_state_dict` are what torchdata's `StatefulDataLoader` calls, in each worker. A state has no
    samples: those that wait, and those of the buffer, are read again.
    """

    def __init__(
        self,
        samples: Any,
        vit_budget: int,
        llm_budget: int,
        *,
        buffer: int = 1000,
        join: Callable[[Sequence[Any]], Any] = collate,
        sample_size: Callable[[Any], tuple[int, int]] = size_of,
        seeks: bool = False,
        costs: PackCosts | None = None,
        beyond: str = "drop",
        seconds: float | None = None,
    ) -> None:
        """Pack `samples`, read anew each epoch, in each worker, on each rank: they must give each its own part.

        Args:
            buffer: samples packed together.
            join: makes a batch of a pack's samples.
            sample_size: (tiles, tokens) of one.
            seeks: whether `samples.load_state_dict` goes on exactly where `state_dict` was called, as Hugging Face's do
                without `shuffle`, whose buffer they forget. If not, a resumed stream is read from its beginning, and
                must give the same samples in the same order.
            costs, beyond, seconds: as in `omnibal_ext.packing.pack`.

        Raises:
            UserError: a buffer without samples; later, what `pack` and `join` raise.
        """
        from torch.utils.data import IterableDataset

        IterableDataset.register(type(self))  # so that DataLoaders know a stream
        self.packer = Packer(vit_budget, llm_budget, costs, beyond, seconds)
        self.samples, self.buffer, self.seeks = samples, whole("buffer", buffer, 1), seeks
        self.join, self.sample_size = join, sample_size
        self.start = deepcopy(samples.state_dict()) if seeks else None
        self.position = Position(state=self.start)

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream is, behind the last pack that was yielded."""
        return self.position._asdict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the position of `state_dict`, from which the next iteration yields packs."""
        self.position = Position(**state)

    def __iter__(self) -> Iterator[Any]:
        """Yield joined packs from the position to the end of the samples; the next time from their beginning."""
        at, reading = self.position, self._read(self.position)
        held = self._waiting(reading, at)
        while True:
            begin, waiting = at.begin, tuple(one.number for one in held)
            new = list(islice(reading, self.buffer))
            held += new
            packs, rest = self.packer.groups_and_rest(held, lambda one: self.sample_size(one.sample))
            if len(new) < self.buffer:
                packs, rest = packs + [rest] * bool(rest), []
            oldest = min(held, default=Held(begin, None, None), key=lambda one: one.number)
            for given, pack in enumerate(packs[at.given :], at.given + 1):
                self.position = Position(oldest.number, oldest.state, waiting, begin, given)
                yield self.join([one.sample for one in pack])
            if len(new) < self.buffer:
                break
            held, at = rest, Position(begin=begin + len(new))
        self.position = Position(state=self.start)

    def _read(self, at: Position) -> Iterator[Held]:
        """Yield samples from number `at.first` on, each with its number and the stream's state before it."""
        if self.seeks:
            self.samples.load_state_dict(deepcopy(at.state))
        reading = iter(self.samples) if self.seeks else islice(self.samples, at.first, None)
        number, state = at.first, at.state
        for sample in reading:
            yield Held(number, state, sample)
            number, state = number + 1, deepcopy(self.samples.state_dict()) if self.seeks else None

    @staticmethod
    def _waiting(reading: Iterator[Held], at: Position) -> list[Held]:
        """Read up to sample `at.begin` and return those of `at.waiting`, in that order; the others were packed."""
        before = {one.number: one for one in islice(reading, at.begin - at.first)}
        return [before[number] for number in at.waiting]
