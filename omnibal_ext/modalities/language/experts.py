"""Mixture of experts, as plain data."""

from dataclasses import dataclass, field

from omnibal_ext.modalities.fields import LATER


@dataclass(frozen=True)
class Experts:
    """Experts instead of an MLP: a router chooses some for each token. The same in all layers that have them."""

    count: int
    chosen: int
    """Experts per token, those of highest probability."""
    renormalised: bool = True
    """The weights of a token's experts are normalised to sum 1; else they are their probabilities among all experts."""
    balance: float = 0.001
    """Coefficient of the routers' load-balancing loss."""
    beside: int = field(default=0, metadata=LATER)
    """Width of a dense MLP next to the experts, for every token; 0: none. MLP and experts have separate norms before
    and after, the router a norm without weight (Gemma 4)."""
    shared: int = 0
    """Width of a shared expert, for every token; 0: none."""
    shared_gate: bool = field(default=True, metadata=LATER)
    """The shared expert's output is multiplied by a gate."""
    sigmoids: bool = field(default=False, metadata=LATER)
    """Scores are sigmoids; the router chooses by score plus a bias per expert without gradient (arXiv 2408.15664).
    Else scores are a softmax over all experts."""
    groups: int = field(default=1, metadata=LATER)
    """Groups of experts. A token's experts are from the `chosen_groups` groups whose two best score highest."""
    chosen_groups: int = field(default=1, metadata=LATER)
    scale: float = field(default=1.0, metadata=LATER)
    """Factor on the weights of a token's experts."""
