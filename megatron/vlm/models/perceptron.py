"""A layer's perceptron with an activation that core has no fused kernel for: of every ViT, and of Gemma 3."""

from collections.abc import Callable

from megatron.core.jit import jit_fuser
from megatron.core.transformer.mlp import MLP
from torch import Tensor

from megatron.vlm.models.recompute import run_recomputed


class Perceptron(MLP):
    """Core's perceptron, gated or not, with the model's own activation.

    The activation is fused with the bias before it where there is a compiler.
    """

    recomputes_activation = False
    """Whether the activation function's output is recomputed."""
    activate: Callable[..., Tensor] | None = None
    """Function that replaces the activation (with bias and gate) between both matrices; None: the configuration's."""

    def forward(
        self, hidden: Tensor, per_token_scale: Tensor | None = None, **_: object
    ) -> tuple[Tensor, Tensor | None]:
        """Map [rows, 1, width] to [rows, 1, width]; also return the last bias, where the caller adds it."""
        inner, bias = self.linear_fc1(hidden)
        activate = self.activate or (_gated if self.config.gated_linear_unit else _activated)
        arguments = (inner, bias, self.config.activation_func)
        activated = run_recomputed(activate, *arguments) if self.recomputes_activation else activate(*arguments)
        out: tuple[Tensor, Tensor | None] = self.linear_fc2(activated)
        return out


@jit_fuser
def _activated(inner: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor]) -> Tensor:
    return activation(inner if bias is None else inner + bias)


@jit_fuser
def _gated(inner: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = (inner if bias is None else inner + bias).chunk(2, dim=-1)
    return activation(gate) * up
