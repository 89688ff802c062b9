"""Megatron-Energon, and with it Megatron-Bridge and NeMo-RL: two budgets for a task encoder's packing buffer.

class Encoder(TwoBudgetPacking, DefaultTaskEncoder):
    vit_budget, llm_budget = 12, 4096

loader = get_train_dataset(..., task_encoder=Encoder(), packing_buffer_size=1000)
"""

from typing import Any

from omnibal_ext.integrations.samples import NO_CONFIG, NO_COSTS, Packer, join, size_of

NO_EFFORT: float | None = None
MULTIPLES = ("in_batch_packing_pad_to_multiple_of", "sequence_length_pad_multiple")
"""What Bridge's and NeMo-RL's encoders call the multiple to which a sample of a pack is padded."""


class TwoBudgetPacking:
    """A mixin, in front of Energon's `TaskEncoder`, Bridge's or NeMo-RL's.

    Set the budgets, and `costs` and `seconds` as in `omnibal_ext.packing.pack` if you like. Samples are dicts with
    `input_ids`, which `join` joins (with `config`), or Bridge's or NeMo-RL's; for others override `sample_size`. An
    encoder that joins samples itself goes on to do so, where `pack_selected_samples` is its own; samples of another
    `group_key` (NeMo-RL) share no pack.
    Samples beyond a budget are left out, with a line that says so (`beyond`).
    """

    vit_budget = llm_budget = 0
    costs = NO_COSTS
    seconds = NO_EFFORT
    beyond = "drop"
    config = NO_CONFIG

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        behind = cls.__mro__[cls.__mro__.index(TwoBudgetPacking) + 1 :]
        owner: Any = next((each for each in behind if "pack_selected_samples" in vars(each)), None)
        is_own = owner is not None and not owner.__module__.startswith("megatron.energon.")  # which only raises
        if is_own and cls.pack_selected_samples is TwoBudgetPacking.pack_selected_samples:
            # Energon reads marks of the function itself.
            setattr(cls, "pack_selected_samples", owner.pack_selected_samples)  # noqa: B010 (mypy refuses an assignment)

    def sample_size(self, sample: Any) -> tuple[int, int]:
        """Return (tiles, tokens) of an encoded sample; tokens up to the multiple to which the encoder pads it."""
        tiles, tokens = size_of(sample)
        multiple = next((getattr(self, name) for name in MULTIPLES if hasattr(self, name)), 1)
        return tiles, -(-tokens // multiple) * multiple

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        """Return a full buffer's samples in packs, a list each, within both budgets; Energon calls it."""
        packer = Packer(self.vit_budget, self.llm_budget, self.costs, self.beyond, self.seconds)
        apart: dict[Any, list[Any]] = {}
        for sample in samples:
            apart.setdefault(getattr(sample, "group_key", None), []).append(sample)
        return [pack for group in apart.values() for pack in packer.groups(group, self.sample_size)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        """Return the samples of a pack joined to one sequence (`join`); Energon calls it."""
        return join(samples, self.config)
