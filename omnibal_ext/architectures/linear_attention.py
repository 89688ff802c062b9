"""Language layers whose cost grows with the length of a sample, not with its square: Gated DeltaNet."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearAttention:
    """Layers that keep a state of one size in the place of all keys and values (arXiv 2412.06464): Qwen3.5's.

    A head of queries and keys serves `heads_a_group` heads of values, each of which has a state of `key_width` x
    `value_width` numbers; queries, keys and values pass a causal convolution over time, each number by itself.
    """

    layers: tuple[int, ...]
    """Numbers among the language model's layers; the others are full attention."""
    groups: int
    """Heads of queries and keys."""
    heads: int
    """Heads of values."""
    key_width: int
    value_width: int
    kernel: int
    """Tokens that the convolution sees, the last one itself."""

    @property
    def heads_a_group(self) -> int:
        """Heads of values to each of queries and keys."""
        return self.heads // self.groups

    @property
    def convolved(self) -> int:
        """Numbers a token and group that pass the convolution: query, key and values."""
        return 2 * self.key_width + self.heads_a_group * self.value_width

    @property
    def projected(self) -> int:
        """Numbers a token and group that the layer's input is projected to: those, a gate of each value, and what a
        head learns by and forgets by."""
        return self.convolved + self.heads_a_group * (self.value_width + 2)

    @property
    def state(self) -> int:
        """Numbers of a group's states."""
        return self.heads_a_group * self.key_width * self.value_width

    def groups_over(self, ranks: int) -> int:
        """Groups on tensor-parallel ranks: the next number that `ranks` divides; what is more are zeros."""
        return -(-self.groups // ranks) * ranks
