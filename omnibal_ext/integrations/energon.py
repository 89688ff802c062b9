"""Megatron-Energon, and with it Megatron-Bridge and NeMo-RL: two budgets for a task encoder's packing buffer.

class Encoder(TwoBudgetPacking, DefaultTaskEncoder):
    vit_budget, llm_budget = 12, 4096

loader = get_train_dataset(..., task_encoder=Encoder(), packing_buffer_size=1000)
"""

from typing import Any

from omnibal_ext.integrations.samples import NO_CONFIG, NO_COSTS, Packer, join, size_of


class TwoBudgetPacking:
    """A mixin, in front of Energon's `TaskEncoder`.

    Set the budgets, and `costs` as in `omnibal_ext.packing.pack` if you like. It expects encoded samples as dicts with
    `input_ids`, which `join` joins (with `config`); for others override
    `sample_size` and `pack_selected_samples`. Samples beyond a budget are left out, with a line that says so
    (`beyond`).
    """

    vit_budget = llm_budget = 0
    costs = NO_COSTS
    beyond = "drop"
    config = NO_CONFIG

    def sample_size(self, sample: Any) -> tuple[int, int]:
        """Return (tiles, tokens) of an encoded sample."""
        return size_of(sample)

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        """Return the samples of a full buffer in packs within both budgets; Energon calls it."""
        packer = Packer(self.vit_budget, self.llm_budget, self.costs, self.beyond)
        return packer.groups(samples, self.sample_size)

    def pack_selected_samples(self, samples: list[Any]) -> dict[str, Any]:
        """Return a pack as one sample (`join`); Energon calls it."""
        return join(samples, self.config)
