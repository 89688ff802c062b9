"""VeOmni: dynamic batches of two budgets, and a second way to share out images (`encoder_data_balance`).

from omnibal_ext.integrations.veomni import install
install(vit_budget=16384)                                # before the trainer is built
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from omnibal_ext.errors import UserError
from omnibal_ext.integrations.samples import Packer, size_of
from omnibal_ext.output import say
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.rebalance.phases import Phase

NAME = "omnibal"
VIT = Phase(linear=1.0, quadratic=1.5e-4)
"""Work of an image of n patches in Qwen3-VL's ViT, by operations: attention is its n^2 part."""


class TwoBudgetBatching:
    """A batching strategy for VeOmni, of two budgets: it has the methods of `BaseBatchingStrategy`."""

    def __init__(
        self,
        vit_budget: int,
        token_micro_bsz: int,
        buffer_size: int = 500,
        *,
        costs: PackCosts | None = None,
        seconds: float | None = None,
        sample_size: Callable[[Any], tuple[int, int]] = size_of,
    ) -> None:
        """Pack `buffer_size` samples at a time; `token_micro_bsz` is the budget of tokens."""
        self.buffer_size, self.sample_size = buffer_size, sample_size
        self.packer = Packer(vit_budget, token_micro_bsz, costs, seconds=seconds)
        self.items: list[Any] = []
        self.packs: list[list[Any]] = []
        self.made = self.held = self.tokens = 0

    def put_item(self, item: Any) -> None:
        """Hold a sample for packing. Leave out one of a single token, as VeOmni does, and, warning, beyond a budget."""
        tiles, tokens = self.sample_size(item)
        if tokens > self.packer.llm_budget or tiles > self.packer.vit_budget:
            say(f"warning: a sample of {tiles} tiles and {tokens} tokens is beyond the budgets: left out", error=True)
        elif tokens > 1:
            self.items.append(item)
            self.held, self.tokens = self.held + 1, self.tokens + tokens

    def is_ready_for_micro_batch(self) -> bool:
        """Say whether `buffer_size` samples are held, and tokens for a pack; until then VeOmni reads more."""
        return self.held >= self.buffer_size and self.tokens >= self.packer.llm_budget

    def get_micro_batch(self, step: int) -> list[Any]:
        """Remove and return the next pack's samples; when half of the packs are gone, all held are packed anew."""
        if self.items and len(self.packs) <= self.made // 2:
            rest = [item for pack in self.packs for item in pack]
            self.packs, emptiest = self.packer.groups_and_rest([*rest, *self.items], self.sample_size)
            self.packs.insert(0, emptiest)  # the last to go
            self.items, self.made = [], len(self.packs)
        pack = self.packs.pop()
        self.held -= len(pack)
        self.tokens -= sum(self.sample_size(item)[1] for item in pack)
        return pack

    def empty(self) -> bool:
        """Say whether no sample is left."""
        return not self.held


def share_out(all_data_lengths: Any, num_replicas: int, dim: int, phase: Phase = VIT) -> list[Any]:
    """Return for each rank its rows of `all_data_lengths`, a tensor [images, 3] with patches in column `dim`.

    The slowest rank takes as few seconds as possible (`omnibal_ext.rebalance`).
    """
    import torch

    rank_of = phase.assign(all_data_lengths[:, dim].cpu().numpy(), num_replicas)
    rows = (torch.from_numpy(np.flatnonzero(rank_of == rank)) for rank in range(num_replicas))
    return [all_data_lengths[row.to(all_data_lengths.device)] for row in rows]


def install(vit_budget: int | None = None, costs: PackCosts | None = None, seconds: float | None = None) -> None:
    """Add `encoder_data_balance_sorting_algo: omnibal` to VeOmni; with `vit_budget`, `dyn_bsz` packs with two budgets.

    That is for `dyn_bsz_runtime: main`. The warm-up of its budget and its other ways to count tokens have no effect.

    With `worker` VeOmni's loader then raises UserError.
    """
    from veomni.data import data_loader
    from veomni.utils.data_balance.balance_sorting_algo import SORTING_ALGO_FUNC

    SORTING_ALGO_FUNC[NAME] = share_out
    if vit_budget is not None:

        def batching(token_micro_bsz: int, buffer_size: int, **_: Any) -> TwoBudgetBatching:
            say(f"omnibal: dynamic batches of at most {vit_budget:,} tiles and {token_micro_bsz:,} tokens")
            return TwoBudgetBatching(vit_budget, token_micro_bsz, buffer_size, costs=costs, seconds=seconds)

        data_loader.TextBatchingStrategy = batching
        data_loader.DynamicBatchingSizeDataset = _refuse_workers


def _refuse_workers(**_: Any) -> Any:
    """Raise UserError: packs of two budgets cannot be made in VeOmni's workers."""
    raise UserError("train.dyn_bsz_runtime worker: batches of two budgets are made in the main process; set it to main")
