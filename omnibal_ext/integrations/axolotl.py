"""axolotl: packs of two budgets for conversations with images, where no sample of a pack sees another.

# in the configuration, for a data set as axolotl's `processor_type: AutoProcessor` has it
plugins: [omnibal_ext.integrations.axolotl.TwoBudgetPlugin]
omnibal_vit_budget: 16384
micro_batch_size: 1
"""

from collections.abc import Mapping, Sequence
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.integrations.samples import NO_COSTS, size_of
from omnibal_ext.integrations.torch_loops import collate
from omnibal_ext.output import say
from omnibal_ext.packing.in_memory import pack

NO_EFFORT: float | None = None
SAMPLES = "omnibal_samples"
"""The column of the packs: the numbers of their samples."""
KERNELS = (None, "eager", "sdpa", "flash_attention_2")
"""Kernels of attention that keep samples apart by their positions; None is transformers' own choice, `sdpa`."""
MUST_NOT_BE = ("sample_packing", "batch_flattening", "streaming", "pretraining_dataset", "rl", "curriculum_sampling",
               "group_by_length", "gemma4_hybrid_attn_impl")  # fmt: skip
"""Settings that mean other packs, other batches, other orders, or attention of axolotl's own."""


def base() -> Any:
    """Return axolotl's `BasePlugin`, of which a plugin must be; `object` where axolotl is not installed."""
    try:
        from axolotl.integrations.base import BasePlugin
    except ImportError:
        return object
    return BasePlugin


class TwoBudgetPlugin(base()):  # type: ignore[misc]
    """Packs axolotl's training set; the budget of tokens is `sequence_len`. What is evaluated stays as it is.

    For `costs`, `seconds` and `beyond`, as in `omnibal_ext.packing.pack`, name a subclass of your own in `plugins`.
    """

    costs = NO_COSTS
    seconds = NO_EFFORT
    beyond = "drop"

    def register(self, cfg: Any) -> None:
        """Note omnibal_vit_budget of the configuration as the user wrote it; axolotl calls this first."""
        super().register(cfg)
        self.vit_budget = cfg.get("omnibal_vit_budget")

    def pre_model_load(self, cfg: Any) -> None:
        """Raise UserError for settings under which samples of a pack would see each other, or budgets not hold."""
        if not isinstance(self.vit_budget, int):
            raise UserError(f"omnibal_vit_budget: {self.vit_budget}: must be the most tiles, or patches, of a pack")
        if not cfg.processor_type or cfg.micro_batch_size != 1 or (cfg.context_parallel_size or 1) > 1:
            raise UserError("omnibal's packs: processor_type, micro_batch_size 1 and no context_parallel_size")
        if wrong := [name for name in MUST_NOT_BE if cfg[name]]:
            raise UserError(f"{wrong[0]}: {cfg[wrong[0]]}: must be left out, or false, with omnibal's packs")
        if cfg.attn_implementation not in KERNELS:
            kernels = ", ".join(filter(None, KERNELS))
            raise UserError(f"attn_implementation: {cfg.attn_implementation}: packs are kept apart by {kernels}")

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Replace the trainer's samples and collator by packs, and its number of steps by that of packs."""
        from datasets import Dataset

        rows, encode, arguments = trainer.train_dataset, trainer.data_collator, trainer.args
        with arguments.main_process_first(desc="sizes of samples"):
            sizes = rows.map(lambda row: dict(zip(("tiles", "tokens"), size_of(encode([row])), strict=True)),
                             remove_columns=rows.column_names, num_proc=cfg.dataset_num_proc, desc="sizes")  # fmt: skip
        groups = pack(sizes["tiles"], sizes["tokens"], self.vit_budget, cfg.sequence_len, costs=self.costs,
                      beyond=self.beyond, seconds=self.seconds)  # fmt: skip
        say(f"omnibal: {len(rows)} samples in {len(groups)} packs")
        trainer.train_dataset, arguments.remove_unused_columns = Dataset.from_dict({SAMPLES: groups}), False
        trainer.data_collator = trainer.train_data_collator = PackCollator(encode, rows, trainer.model.config)
        if not cfg.max_steps:  # axolotl counts samples
            share = len(groups) / len(rows)
            arguments.max_steps = -1
            arguments.warmup_steps = cfg.warmup_steps or round(arguments.warmup_steps * share)


class PackCollator:
    """A pack as its model reads it: each sample encoded by axolotl's collator, all joined by `torch_loops.collate`."""

    def __init__(self, encode: Any, rows: Any, config: Any) -> None:
        self.encode, self.rows, self.config = encode, rows, config

    def __call__(self, packs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the batch of one pack; `packs` is a list of one row, the numbers of its samples."""
        (numbers,) = (one[SAMPLES] for one in packs)
        return collate([self.encode([self.rows[number]]) for number in numbers], self.config)


def proved(samples: Sequence[Mapping[str, Any]], config: Any) -> dict[str, Any]:
    """Return processors' samples as one batch, joined as packs are in training; for `omnibal prove`."""
    return PackCollator(lambda rows: rows[0], samples, config)([{SAMPLES: range(len(samples))}])
