"""The work of a layer: operations, memory traffic and bytes kept; and formulas that ViT and language layers share."""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

BYTES = 2  # per bf16 number


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one layer on a pack at the budget, of all tensor-parallel ranks together; with `copies`, of each."""

    parameters: int
    matrix_weights: int
    """Parameters that every token is multiplied with."""
    tokens: int
    width: int
    kept: float
    """Bytes saved for the backward."""
    late: float = 0.0
    """Bytes held from B to W; 0: B computes the gradients of all weights."""
    cheap: float = 0.0
    """Bytes of `kept` that cheap recomputation does not keep: outputs of norms and activation functions."""
    cheap_passes: float = 0.0
    """Reads and writes of the hidden states by that recomputation."""
    attention: float = 0.0
    """Forward operations of attention."""
    per_square: float = 0.0
    """Forward operations of attention times a sample's length squared; 0 in the ViT, where they grow with tiles."""
    score_bytes: float = 0.0
    """Bytes of scores read and written in the forward, times a sample's length squared; 0 with flash attention."""
    states: float = 0.0
    """Forward operations a token of linear attention as a recurrence, whatever chunks a kernel computes."""
    passes: float = 2.0
    """Reads and writes of the hidden states by elementwise operations, forward."""
    blocks: float = 0
    """Tensor-parallel blocks (attention, MLP) that end in an all-reduce; a gather or scatter is half of one."""
    exchanged: int = 0
    """Numbers sent to other ranks of a team and back, for a token of a sample that is cut between them."""
    exchanged_keys: int = 0
    """Part of `exchanged`: keys and values, in `key_groups` groups."""
    key_groups: int = 0
    expert_parameters: int = 0
    """Parameters of experts, among `parameters`."""
    routed: int = 0
    """Numbers a token in the inputs of its experts; their outputs have as many."""
    for_weights: float = 0.0
    """Bytes of `kept` used only by gradients of weights that get no adapters: LayerScale, experts."""
    copies: bool = False
    """Whether every tensor-parallel rank does all of the work: the patch embedding."""
    whole_output: bool = False
    """Whether every tensor-parallel rank has, and sends, all of the output: image and audio tokens."""
    input_gradient: float = 1.0
    """Share of its products whose inputs have gradients. Pixels have none, unless a norm with weights comes first, and
    log-mel spectrograms."""

    def shares(self, t: int) -> int:
        """Return how many of `t` tensor-parallel ranks divide the work: all, or 1 where each does all of it."""
        return 1 if self.copies else t


def passes(h: int, key_value: int, activations: int, others: float) -> float:
    """Count how often a layer's unfused operations read or write the hidden states (`h` numbers a token), forward: two
    norms (4), two residuals (6), attention's inputs and output (2, key and value), the activation function's input and
    output; `others`: norm of query and key (4), branch norms (4), LayerScale (4), rotation."""
    return 4 + 6 + 2 + (key_value + activations) / h + others


def cheap_passes(h: int, activations: int) -> float:
    """Count those `passes` that cheap recomputation repeats: two norms and the activation function."""
    return 4 + activations / h


def kept(h: int, key_value: int, activations: int, normed: int = 0, layer_scale: bool = False) -> int:
    """Return how many numbers a token a layer keeps for its backward.

    Inputs of both norms, of QKV and of the MLP (4 h); query and attention output (2 h); key and value; input and output
    of the activation function; inputs of query, key and branch norms (`normed`); inputs of LayerScale (2 h).
    """
    return 6 * h + key_value + activations + normed + 2 * h * layer_scale


def exchange_costs(work: Work, shares: int, number_seconds: float) -> dict[str, Any]:
    """Return `LayerCost`'s fields for what a team's ranks send each other; `shares`: tensor ranks that divide it."""
    return {
        "exchange_seconds": work.exchanged / shares * number_seconds,
        "exchange_key_seconds": work.exchanged_keys / shares * number_seconds,
        "exchange_groups": work.key_groups / shares,
    }


@dataclass(frozen=True)
class HeadShares:
    """Query heads, and key-value groups, that each rank of a team computes, as evenly as possible.

    The ranks of a team send each other query, key and value heads of samples cut between them:

    forward     a rank's rows x (heads + 2 x key-value groups of every other rank)    to compute attention
                the other ranks' rows x the rank's heads                              outputs, sent back
    backward    the same, in the other direction

    A `rank` is the number of a rank in its team.

    8 heads in 4 groups over 3 ranks: heads 0-1, 2-4, 5-7 with groups 0, 1-2, 2-3. With more ranks than heads some
    compute none.
    """

    count: int
    """Query heads of a tensor-parallel rank."""
    kv_groups: int
    """Key-value groups of a tensor-parallel rank."""
    ranks: int

    @property
    def each(self) -> int:
        """Query heads per key-value group."""
        return self.count // self.kv_groups

    @cached_property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """Query heads [first, end) of each rank."""
        ends = [self.count * rank // self.ranks for rank in range(self.ranks + 1)]
        return tuple(pairwise(ends))

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Key-value groups [first, end) that these heads read; (0, 0) without heads."""
        return tuple((a // self.each, -(-b // self.each)) if a < b else (0, 0) for a, b in self.heads)

    def widths(self, rank: int) -> tuple[int, int]:
        """Return how many query heads and how many key-value groups a rank of the team has."""
        (first, end), (first_group, end_group) = self.heads[rank], self.groups[rank]
        return end - first, end_group - first_group

    def by_head(self, rank: int) -> list[int] | None:
        """Return which of a rank's groups each of its heads belongs to; None if it has all heads of its groups."""
        (first, end), (first_group, end_group) = self.heads[rank], self.groups[rank]
        if (first_group * self.each, end_group * self.each) == (first, end):
            return None
        return [head // self.each - first_group for head in range(first, end)]
