"""What a model must compute for given samples, whoever computes it how: the upper part of model FLOPs utilisation.

Counted are multiplications with weights and attention, 2 operations each, forward and backward. Not counted are
padding, recomputation, elementwise work, the head's other tokens than those that are to be predicted, and gradients
that nobody needs: of frozen weights, and of everything before the first trained layer. Attention is counted once
forward and twice backward (the flash kernel's second forward is recomputation), half of it under the language model's
causal mask, and for each sample apart: sum(length^2). Of linear attention what is read of states and added to them is
counted, token by token, whatever chunks a kernel computes it in.
"""

from collections import Counter
from dataclasses import dataclass

from omnibal_ext.adapters import NO_ADAPTERS, Adapters, adapter_parameters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.chain import VISION_KINDS, chain_kind, gradient_mode
from omnibal_ext.costs.analytic import DEVICES
from omnibal_ext.costs.works import layer_works

PASSES = {"trained": 3, "adapted": 2, "frozen": 2, "idle": 1}
"""Forward; gradients of inputs; gradients of weights."""


@dataclass(frozen=True)
class ModelOperations:
    """Operations of one optimizer step, forward and backward, for each unit of its samples."""

    tile: float
    token: float
    square: float
    """For each token squared, of a sample's length."""
    counted: float
    """For each token that is to be predicted."""

    @classmethod
    def of(
        cls, model: Architecture, frozen: tuple[str, ...] = (), adapters: Adapters = NO_ADAPTERS
    ) -> "ModelOperations":
        """Count a model's layers, some of whose parts may be frozen, and adapters."""
        works, added, frozen = layer_works(model, 1, 1, 1), adapter_parameters(model, adapters), adapters.frozen(frozen)
        units = dict.fromkeys(("tile", "token", "square", "counted"), 0.0)
        counts = Counter(model.cost_kinds)
        for kind, layers in counts.items():
            work, mode = works[kind], gradient_mode(kind, frozen, adapters.targets)
            passes = PASSES[mode]
            matrices = 2.0 * work.tokens * work.matrix_weights * layers
            if not work.input_gradient:
                passes = min(passes, 2)
            unit = "tile" if chain_kind(kind) in VISION_KINDS else "counted" if kind == "head" else "token"
            units[unit] += matrices * passes + 3 * 2.0 * work.tokens * added.get(kind, 0.0) * layers
            attention = layers * (1 if mode == "idle" else 3)
            if chain_kind(kind) == "vit":
                units["tile"] += work.attention * attention
            units["token"] += work.states * attention
            units["square"] += work.per_square * attention
        return cls(**units)

    def total(self, tiles: float, tokens: float, squares: float, counted: float) -> float:
        """Operations for samples of so many tiles, tokens, squared lengths, and tokens to be predicted."""
        return self.tile * tiles + self.token * tokens + self.square * squares + self.counted * counted


def peak_operations(device_name: str) -> float | None:
    """Dense bf16 operations a second of a GPU by the name that its driver gives; None where that is not known."""
    return next((device.flops for name, device in DEVICES.items() if name in device_name.lower()), None)
