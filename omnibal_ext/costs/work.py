"""What a layer asks for, as data, and what transformer layers of all towers have alike."""

from dataclasses import dataclass
from typing import Any

BYTES = 2  # of a bf16 number


@dataclass(frozen=True, slots=True)
class Work:
    """One layer of a kind at the budget, of all tensor-parallel ranks together; or, of `copies`, of each of them."""

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
    """Bytes of `kept` that elementwise operations give again."""
    cheap_passes: float = 0.0
    """Reads and writes of the stream by these."""
    attention: float = 0.0
    """Operations forward."""
    per_square: float = 0.0
    """Attention operations for each token squared, where samples share a pack; 0 where attention grows with tiles."""
    score_bytes: float = 0.0
    """Read and written of scores, forward, for each token squared of a sample's length, where no kernel hides them."""
    states: float = 0.0
    """Operations a token, forward, on the states of linear attention, in whatever chunks a kernel computes them."""
    passes: float = 2.0
    """Reads and writes of the stream by elementwise operations, forward."""
    blocks: float = 0
    """Tensor-parallel blocks (attention, MLP) that end in an all-reduce; a gather or scatter is half of one."""
    exchanged: int = 0
    """Numbers a token that travel there and back where several ranks hold parts of its sample."""
    exchanged_keys: int = 0
    """Of these keys and values, in `key_groups`."""
    key_groups: int = 0
    expert_parameters: int = 0
    """Parameters of experts, among `parameters`."""
    routed: int = 0
    """Numbers a token that its experts take, and as many that they give."""
    for_weights: float = 0.0
    """Bytes of `kept` that only gradients of weights ask for which can have no adapters: of LayerScale, of experts."""
    copies: bool = False
    """Whether every tensor-parallel rank does all of it: the first link."""
    input_gradient: bool = True
    """What its matrices multiply has a gradient: not pixels, unless a norm between has weights."""

    def shares(self, t: int) -> int:
        """Among how many of `t` tensor-parallel ranks it is divided."""
        return 1 if self.copies else t


def passes(h: int, key_value: int, activations: int, others: float) -> float:
    """Reads and writes of n h numbers, unfused: two norms (4), two residuals (6), attention in and out (2 and key and
    value), the activation function in and out; `others`: norm of query and key (4), of both branches (4), LayerScale
    (4), or rotation."""
    return 4 + 6 + 2 + (key_value + activations) / h + others


def cheap_passes(h: int, activations: int) -> float:
    """Of `passes` those of two norms and of the activation function, in and out."""
    return 4 + activations / h


def kept(h: int, key_value: int, activations: int, normed: int = 0, layer_scale: bool = False) -> int:
    """Numbers a token that a layer's backward needs.

    The inputs of both norms, of QKV and of the MLP (4 h); query and attention output (2 h); key and value; what goes in
    and out of the activation function; query and key before their norm, branches before theirs (`normed`); branches
    before LayerScale (2 h).
    """
    return 6 * h + key_value + activations + normed + 2 * h * layer_scale


def exchange_costs(work: Work, shares: int, number_seconds: float) -> dict[str, Any]:
    """What `LayerCost` has of the exchange in teams, on one of so many tensor-parallel ranks, from seconds a number."""
    return {
        "exchange_seconds": work.exchanged / shares * number_seconds,
        "exchange_key_seconds": work.exchanged_keys / shares * number_seconds,
        "exchange_groups": work.key_groups / shares,
    }
