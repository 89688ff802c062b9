"""Experts in the place of a layer's perceptron, as plain data."""

from dataclasses import dataclass, field

from omnibal_ext.architectures.fields import LATER


@dataclass(frozen=True)
class Experts:
    """Perceptrons in the place of one, some of which each token goes through: a router chooses.

    They are alike in all layers that have them.
    """

    count: int
    chosen: int
    """Those that a token goes through: the likeliest."""
    renormalised: bool = True
    """What a token's experts weigh adds up to 1; else they weigh as likely as they are among all."""
    balance: float = 0.001
    """What the routers' balance loss weighs in training."""
    beside: int = field(default=0, metadata=LATER)
    """Width of a perceptron beside the experts, through which every token goes too: both have norms of their own in
    front and behind, and the router one without a weight (Gemma 4); 0: there is none."""
    shared: int = 0
    """Width of one more perceptron, through which every token goes; 0: there is none."""
    shared_gate: bool = field(default=True, metadata=LATER)
    """That one's output is multiplied with a gate of its own."""
    sigmoids: bool = field(default=False, metadata=LATER)
    """How likely an expert is says a sigmoid for each; by that and a bias of its own, which is not trained, the router
    chooses (arXiv 2408.15664). Else a softmax over all."""
    groups: int = field(default=1, metadata=LATER)
    """Groups of experts; a token's are those of the likeliest groups, by their two likeliest experts."""
    chosen_groups: int = field(default=1, metadata=LATER)
    scale: float = field(default=1.0, metadata=LATER)
    """What a token's experts weigh is multiplied with."""
    dense_layers: int = field(default=0, metadata=LATER)
    """Layers in front that have one perceptron in the place of experts."""
    dense_width: int = field(default=0, metadata=LATER)
    """Its width."""
