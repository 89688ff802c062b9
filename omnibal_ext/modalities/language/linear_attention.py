"""Language layers whose cost grows with the length of a sample, not with its square: Gated DeltaNet."""

from dataclasses import dataclass

from omnibal_ext.modalities.fields import filled_up


@dataclass(frozen=True)
class LinearAttention:
    """Gated DeltaNet (arXiv 2412.06464, Qwen3.5): a state of fixed size instead of all keys and values.

    A query-key head (group) serves `heads_a_group` value heads, each with a state of `key_width` x `value_width`
    numbers. Queries, keys and values first pass a causal depthwise convolution over tokens.
    """

    groups: int
    """Query-key heads."""
    heads: int
    """Value heads."""
    key_width: int
    value_width: int
    kernel: int
    """Width of the convolution in tokens, the current one included."""

    @property
    def heads_a_group(self) -> int:
        """Value heads per query-key head."""
        return self.heads // self.groups

    @property
    def convolved(self) -> int:
        """Channels of the convolution per group: query, key, values."""
        return 2 * self.key_width + self.heads_a_group * self.value_width

    @property
    def projected(self) -> int:
        """Outputs of the input projection per group: `convolved`, a gate for each value, and per value head a learning
        rate and a decay."""
        return self.convolved + self.heads_a_group * (self.value_width + 2)

    @property
    def state(self) -> int:
        """Numbers in the states of a group."""
        return self.heads_a_group * self.key_width * self.value_width

    def groups_over(self, ranks: int) -> int:
        """Return how many groups (query-key heads) `ranks` ranks have in all: padded to a multiple of `ranks`."""
        return filled_up(self.groups, ranks)
