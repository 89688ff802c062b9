"""Experts parallel to a dense perceptron (Gemma 4): each has a norm before and after, and the outputs are added.

stream ── norm ── perceptron ── norm ──────────── + ──> the branch's own norm, the residual connection
   ├──── norm ── experts, weighed ── norm ─────── ┘
   └──── router, with a norm inside ──┘
"""

from copy import copy
from functools import partial
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.vlm.models.mixture.experts import Experts, Perceptrons
from megatron.vlm.models.mixture.router import Balance, ScaledRouter
from megatron.vlm.models.norm import build_norm
from megatron.vlm.models.perceptron import Perceptron


class ExpertsBeside(Experts):
    """Experts and perceptron in parallel, on rows that are not normalised yet: [tokens here, 1, width], in and out."""

    def __init__(
        self, config: TransformerConfig, *, width: int, projections: MLPSubmodules,
        pg_collection: ProcessGroupCollection, **core: Any,
    ) -> None:  # fmt: skip
        both = MoESubmodules(experts=Perceptrons, router=ScaledRouter)
        super().__init__(config, submodules=both, pg_collection=pg_collection, **core)
        own = copy(config)
        own.ffn_hidden_size = width
        self.perceptron = Perceptron(own, projections, tp_group=pg_collection.tp)
        norm = partial(build_norm, config, config.hidden_size, config.layernorm_epsilon)
        self.perceptron_norm, self.perceptron_after = norm(), norm()
        self.experts_norm, self.experts_after = norm(), norm()

    def forward(
        self, hidden_states: Tensor, intermediate_tensors: None = None, padding_mask: Balance | None = None
    ) -> tuple[Tensor, None]:
        """Return the sum of the perceptron's and the chosen experts' outputs for each token, and no bias."""
        self.router.balance = padding_mask
        routed = self.routed(self.experts_norm(hidden_states), *self.router(hidden_states))
        beside, _ = self.perceptron(self.perceptron_norm(hidden_states))
        return self.perceptron_after(beside) + self.experts_after(routed), None


def beside_builder(projections: MLPSubmodules, width: int) -> partial[ExpertsBeside]:
    """Return what builds experts, and a perceptron of this `width`, in place of a layer's perceptron and its norm."""
    return partial(ExpertsBeside, projections=projections, width=width)
