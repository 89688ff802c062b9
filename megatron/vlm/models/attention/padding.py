"""Padding of attention heads, where the tensor-parallel size does not divide the model's heads.

    25 heads on 4 ranks                                  | 7 | 7 | 7 | 4 + 3 of zeros |
    14 heads that share 2 keys and values, on 4 ranks    | 7 | 7 | 7 of zeros | 7 of zeros |

Heads that share a key and value are a group, and stay on one rank; without sharing, each head is a group. A padding
head, whose weights are all zero, outputs zero and gets gradients of exactly zero: the model is the same. Padding comes
last, so weights differ between tensor-parallel sizes in trailing zeros only, and checkpoints load at any size.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

Initialization = Callable[[Tensor], Any]


def zero_padding(weight: Tensor, dim: int, true_size: int, group: ProcessGroup) -> None:
    """Set to zero the entries from `true_size` on of a weight that is cut along `dim` over the ranks of `group`."""
    local = weight.shape[dim]
    true_local = min(max(true_size - group.rank() * local, 0), local)
    weight.data.narrow(dim, true_local, local - true_local).zero_()


def loads_without_padding(state: ShardedStateDict) -> ShardedStateDict:
    """Let checkpoint entries load from another tensor-parallel size: what lacks becomes zero, surplus is dropped."""
    for entry in state.values():
        if isinstance(entry, ShardedTensor):
            entry.allow_shape_mismatch = True
    return state


class Padded:
    """A mixin of linear classes: a projection of which only `true_size` rows or columns belong to true heads."""

    dim: int
    """Axis of the weight that is cut over the ranks."""
    weight: Tensor

    def __init__(
        self, *sizes: int, true_size: int, init_method: Initialization, tp_group: ProcessGroup, **core: Any
    ) -> None:
        draw = partial(_draw, init_method, self.dim, true_size)
        super().__init__(*sizes, init_method=draw, tp_group=tp_group, **core)  # type: ignore[call-arg]
        zero_padding(self.weight, self.dim, true_size, tp_group)

    def sharded_state_dict(self, *arguments: Any, **options: Any) -> ShardedStateDict:
        """Return core's entries, which a checkpoint of another tensor-parallel size can fill."""
        return loads_without_padding(super().sharded_state_dict(*arguments, **options))  # type: ignore[misc]


class QueryKeyValue(Padded):
    """The projection to query, key and value, for `groups` true groups of heads among `filled` with padding.

    `has_bias` replaces core's setting. `heads_less`: heads that each group lacks of query, key and value: one where one
    matrix gives keys and values, two where it gives neither.
    """

    dim = 0

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, groups: int, filled: int,
        has_bias: bool, heads_less: int = 0, **core: Any,
    ) -> None:  # fmt: skip
        output_size -= filled * config.kv_channels * heads_less
        core |= {"config": config, "bias": has_bias, "true_size": output_size // filled * groups}
        super().__init__(input_size, output_size, **core)


class AttentionOutput(Padded):
    """The projection behind the attention, for `groups` true groups of heads among `filled` with padding."""

    dim = 1

    def __init__(self, input_size: int, output_size: int, *, groups: int, filled: int, **core: Any) -> None:
        super().__init__(input_size, output_size, true_size=input_size // filled * groups, **core)


@cache
def mixed(mixin: type, projection: type) -> type:
    """Return the subclass of `projection` that has the methods of `mixin` first; the same class for the same two."""
    return type(mixin.__name__, (mixin, projection), {})


def _draw(init_method: Initialization, dim: int, true_size: int, weight: Tensor) -> None:
    """Draw the weights of true heads only, so that a weight drawn whole has the same numbers as on one rank."""
    shape = list(weight.shape)
    shape[dim] = min(true_size, shape[dim])
    drawn = weight.new_empty(shape)
    init_method(drawn)
    weight.data.narrow(dim, 0, shape[dim]).copy_(drawn)
