"""What ranks of a team exchange of a wide pack, in numbers: heads of samples that are cut, layer by layer.

forward of a layer     rows of a place x (heads + 2 x groups of every other one)      there
                       rows of the others x heads of a place                          and back
backward               the same, the other way
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class HeadShares:
    """Which query heads, and which groups of keys and values, every place of a team computes: as even as can be.

    Eight heads in four groups over three places: heads 0-1, 2-4, 5-7 with groups 0, 1-2, 2-3. Where more places than
    heads are, some compute none.
    """

    count: int
    """Heads of a tensor-parallel rank."""
    kv_groups: int
    """Its groups of keys and values."""
    places: int

    @property
    def each(self) -> int:
        """Heads that share a group."""
        return self.count // self.kv_groups

    @cached_property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """First and last + 1 of every place."""
        ends = [self.count * place // self.places for place in range(self.places + 1)]
        return tuple(pairwise(ends))

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Those that these heads read."""
        return tuple((a // self.each, -(-b // self.each)) if a < b else (0, 0) for a, b in self.heads)

    def widths(self, place: int) -> tuple[int, int]:
        """How many heads and groups a place has."""
        (first, end), (first_group, end_group) = self.heads[place], self.groups[place]
        return end - first, end_group - first_group

    def by_head(self, place: int) -> list[int] | None:
        """Of each head of a place its group among those of the place; None where all have as many in a row."""
        (first, end), (first_group, end_group) = self.heads[place], self.groups[place]
        if (first_group * self.each, end_group * self.each) == (first, end):
            return None
        return [head // self.each - first_group for head in range(first, end)]

    def numbers_sent(self, rows: Sequence[int], width: int, place: int) -> int:
        """What a place sends to others in the forward pass of a layer with heads of `width` numbers.

        `rows` are those of samples that are cut, of every place.
        """
        others = [other for other in range(self.places) if other != place]
        there = rows[place] * sum(heads + 2 * groups for heads, groups in map(self.widths, others))
        return (there + sum(rows[other] for other in others) * self.widths(place)[0]) * width
