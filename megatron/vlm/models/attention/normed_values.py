"""Attention that normalises value heads, as well as those of queries and keys; keys may serve as values (Gemma 4).

Keys and values may be an earlier layer's, after their norms (Gemma 4 E2B).
"""

import torch
from megatron.core.tensor_parallel import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from megatron.vlm.models.norm import normalised_heads


class NormedValues(SelfAttention):
    """Core's attention, with an RMSNorm without weight on every value head."""

    gives = False
    """Whether later layers use this layer's keys and values."""
    given: tuple[Tensor, ...] = ()
    """Key and value [T, 1, local groups, d] of the current pack, before RoPE."""

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        output_gate: bool = False,
        split_qkv: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project this rank's rows [n, 1, width] to query [T, 1, local heads, d], key and value [T, 1, groups, d]."""
        query, key, value = self._projected(hidden_states)
        if self.gives:
            self.given = key, value
        return query, key, value

    def give(self) -> tuple[Tensor, ...]:
        """Return key and value for later layers, or (), and drop the references."""
        given, self.given = self.given, ()
        return given

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().get_query_key_value_tensors(hidden)
        return query, key, normalised_heads(value, self.config.layernorm_epsilon)


class KeysAsValues(NormedValues):
    """Attention with one projection for keys and values, normalised separately for each.

    If there are more ranks than groups, several ranks share one: each gathers all of it, and uses its own heads.
    """

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mixed, _ = self.linear_qkv(hidden)
        width, group = self.hidden_size_per_attention_head, self.pg_collection.tp
        heads = self.config.num_attention_heads // self.config.num_query_groups
        sharing = max(1, group.size() // self.config.num_query_groups)
        if sharing > 1:
            whole = all_gather_last_dim_from_tensor_parallel_region(mixed, group=group)
            mixed = whole.chunk(self.config.num_query_groups, dim=-1)[group.rank() // sharing]
        groups = mixed.unflatten(-1, (-1, heads + 1, width))
        query, key = groups[..., :heads, :].flatten(2, 3), groups[..., heads, :].contiguous()
        query = query.chunk(sharing, dim=2)[group.rank() % sharing] if sharing > 1 else query
        value = normalised_heads(key, self.config.layernorm_epsilon)
        assert isinstance(self.q_layernorm, torch.nn.Module)
        assert isinstance(self.k_layernorm, torch.nn.Module)
        return self.q_layernorm(query), self.k_layernorm(key), value


class QueriesAlone(NormedValues):
    """Attention whose key and value are an earlier layer's; the layer puts them into `taken` for each pack."""

    taken: tuple[Tensor, ...] = ()

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, _ = self.linear_qkv(hidden)
        (key, value), self.taken = self.taken, ()
        assert isinstance(self.q_layernorm, torch.nn.Module)
        return self.q_layernorm(query.unflatten(-1, (-1, self.hidden_size_per_attention_head))), key, value
