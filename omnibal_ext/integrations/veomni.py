"""VeOmni: dynamic batches of two budgets, and a second way to share out images (`encoder_data_balance`).

from omnibal_ext.integrations.veomni import install
install(vit_budget=16384)                                # before the trainer is built
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from omnibal_ext.integrations.samples import Packer, size_of
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.rebalance.phases import Phase

NAME = "omnibal"
VIT = Phase(linear=1.0, quadratic=1.5e-4)
"""Work of an image of n patches in Qwen3-VL's ViT, by operations: attention is its n^2 part."""


class TwoBudgetBatching:
    """What VeOmni calls a batching strategy: it has the methods of `BaseBatchingStrategy`."""

    def __init__(
        self,
        vit_budget: int,
        token_micro_bsz: int,
        buffer_size: int = 500,
        *,
        costs: PackCosts | None = None,
        sample_size: Callable[[Any], tuple[int, int]] = size_of,
    ) -> None:
        """`token_micro_bsz` is the budget of tokens; the first packs are made of `buffer_size` samples."""
        self.buffer_size, self.sample_size = buffer_size, sample_size
        self.packer = Packer(vit_budget, token_micro_bsz, costs)
        self.items: list[Any] = []
        self.packs: list[list[Any]] = []

    def put_item(self, item: Any) -> None:
        """Take a sample; of one token, as VeOmni does, none."""
        if self.sample_size(item)[1] > 1:
            self.items.append(item)

    def is_ready_for_micro_batch(self) -> bool:
        """Whether there is a pack, or enough samples for some."""
        return bool(self.packs) or len(self.items) >= self.buffer_size

    def get_micro_batch(self, step: int) -> list[Any]:
        """Return the samples of the next pack."""
        if not self.packs:
            self.packs, self.items = self.packer.groups_and_rest(self.items, self.sample_size)
            if not self.packs:
                self.packs, self.items = [self.items], []
        return self.packs.pop()

    def empty(self) -> bool:
        """Whether no sample is left."""
        return not self.packs and not self.items


def share_out(all_data_lengths: Any, num_replicas: int, dim: int, phase: Phase = VIT) -> list[Any]:
    """Return the rows of `all_data_lengths`, a tensor [images, 3] with patches in column `dim`, for each rank.

    The slowest rank takes as few seconds as possible (`omnibal_ext.rebalance`).
    """
    import torch

    rank_of = phase.assign(all_data_lengths[:, dim].cpu().numpy(), num_replicas)
    rows = (torch.from_numpy(np.flatnonzero(rank_of == rank)) for rank in range(num_replicas))
    return [all_data_lengths[row.to(all_data_lengths.device)] for row in rows]


def install(vit_budget: int | None = None, costs: PackCosts | None = None) -> None:
    """Add `encoder_data_balance_sorting_algo: omnibal`; with `vit_budget`, `dyn_bsz` packs with two budgets.

    That is for `dyn_bsz_runtime: main`. The warm-up of its budget and its other ways to count tokens have no effect.
    """
    from veomni.data import data_loader
    from veomni.utils.data_balance.balance_sorting_algo import SORTING_ALGO_FUNC

    SORTING_ALGO_FUNC[NAME] = share_out
    if vit_budget is not None:
        data_loader.TextBatchingStrategy = lambda token_micro_bsz, buffer_size, **_: TwoBudgetBatching(
            vit_budget, token_micro_bsz, buffer_size, costs=costs
        )
