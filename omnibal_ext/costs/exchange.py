"""Numbers that the ranks of a team send each other in a layer: query, key and value heads of samples cut between them.

forward     a rank's rows x (heads + 2 x key-value groups of every other rank)    to compute attention
            the other ranks' rows x the rank's heads                              outputs, sent back
backward    the same, in the other direction

A `place` is the number of a rank in its team.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class HeadShares:
    """Query heads, and key-value groups, that each rank of a team computes, as evenly as possible.

    8 heads in 4 groups over 3 ranks: heads 0-1, 2-4, 5-7 with groups 0, 1-2, 2-3. With more ranks than heads some
    compute none.
    """

    count: int
    """Query heads of a tensor-parallel rank."""
    kv_groups: int
    """Its key-value groups."""
    places: int

    @property
    def each(self) -> int:
        """Query heads per key-value group."""
        return self.count // self.kv_groups

    @cached_property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """Query heads [first, end) of each rank."""
        ends = [self.count * place // self.places for place in range(self.places + 1)]
        return tuple(pairwise(ends))

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Key-value groups [first, end) that these heads read; (0, 0) without heads."""
        return tuple((a // self.each, -(-b // self.each)) if a < b else (0, 0) for a, b in self.heads)

    def widths(self, place: int) -> tuple[int, int]:
        """Return the numbers of heads and of groups of a rank."""
        (first, end), (first_group, end_group) = self.heads[place], self.groups[place]
        return end - first, end_group - first_group

    def by_head(self, place: int) -> list[int] | None:
        """Return the group of each of a rank's heads, counted from its first; None if all its groups are complete."""
        (first, end), (first_group, end_group) = self.heads[place], self.groups[place]
        if (first_group * self.each, end_group * self.each) == (first, end):
            return None
        return [head // self.each - first_group for head in range(first, end)]
