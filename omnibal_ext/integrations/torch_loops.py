"""TRL, transformers' Trainer, Accelerate, Lightning, a plain loop: a batch sampler of packs; `join` is the collate.

sampler = PackedBatches(tiles, tokens, vit_budget=12, llm_budget=4096, ranks=world_size)
loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from omnibal_ext.errors import UserError
from omnibal_ext.families.family import Packs
from omnibal_ext.integrations.samples import REMEDY, epoch_effort, join
from omnibal_ext.joining.checks import check_model, check_rotation
from omnibal_ext.joining.fields import is_of_media
from omnibal_ext.joining.masks import image_masks
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.in_memory import pack, whole


class PackedBatches:
    """Yields the sample numbers of one pack at a time: of all ranks in turn, or of one `rank`.

    Trainer, TRL and Accelerate give batch i to process i modulo the number of processes (`even_batches=False`): leave
    `rank` out. Lightning (`use_distributed_sampler=False`) and plain DDP read a sampler of their own rank. Each epoch
    is packed anew, whether the trainer calls `set_epoch` (Accelerate does not, where it shards batches) or only reads
    once more; every rank gets equally many packs, for which the largest are divided.
    """

    def __init__(
        self,
        tiles: Any,
        tokens: Any,
        vit_budget: int,
        llm_budget: int,
        *,
        ranks: int,
        rank: int | None = None,
        costs: PackCosts | None = None,
        beyond: str = "error",
        seed: int = 0,
        seconds: float | None = None,
    ) -> None:
        """Pack as `omnibal_ext.packing.pack`, by default with more effort. Raises UserError as it does, at once, for a
        rank that is none of them, and where no sample is left."""
        if whole("ranks", ranks, 1) and rank is not None and not 0 <= rank < ranks:
            raise UserError(f"rank {rank} is not one of {ranks} data-parallel ranks")
        self._sizes, self._budgets = (tiles, tokens), (vit_budget, llm_budget)
        self._ranks, self._rank, self._seed, self._epoch = ranks, rank, seed, 0
        self._samples = len(np.atleast_1d(tokens))
        effort = epoch_effort(self._samples, seconds)
        self._how: dict[str, Any] = {"costs": costs, "beyond": beyond, "seconds": effort}
        self._packs, self._begun = self._pack(), False
        self._is_shared_out = False

    def set_epoch(self, epoch: int) -> None:
        """Pack epoch `epoch`, to be read next; later ones follow by themselves: needed only to resume in one."""
        self._begun = False
        if epoch != self._epoch:
            self._epoch = epoch
            self._packs = self._pack()

    def __len__(self) -> int:
        """Count the packs yielded in the current epoch: of all ranks, or of this `rank`."""
        return len(self._packs) // (1 if self._rank is None else self._ranks)

    def __iter__(self) -> Iterator[list[int]]:
        """Return an iterator over the epoch's packs; if that was begun before, pack the next epoch and give its.

        Raises UserError if each process would read the packs of all.
        """
        if self._ranks > 1 and self._rank is None and not self._is_shared_out and _processes() > 1:
            raise UserError(
                f"PackedBatches: nothing shares its packs out over {_processes()} processes, each would train on all: "
                "give rank (in Lightning keep Trainer(use_distributed_sampler=False) with it)"
            )
        if self._begun:
            self.set_epoch(self._epoch + 1)
        self._begun = True
        return iter(self._packs if self._rank is None else self._packs[self._rank :: self._ranks])

    @property
    def batch_size(self) -> None:
        """None, as packs differ in size. Libraries read it before they shard the batches.

        Raises UserError if the sampler has a rank, as each process would get only some of that rank's packs.
        """
        if self._rank is not None:
            raise UserError(
                f"PackedBatches: made for rank {self._rank}, but about to be sharded again: leave rank out, or, in "
                "Lightning, keep it and set Trainer(use_distributed_sampler=False)"
            )
        self._is_shared_out = True

    def _pack(self) -> list[list[int]]:
        packs = pack(*self._sizes, *self._budgets, **self._how, seed=self._seed + self._epoch)
        if self._samples and not packs:
            raise UserError("every sample is beyond a budget, no pack is left: raise the budgets")
        while len(packs) % self._ranks:
            largest = max(range(len(packs)), key=lambda number: len(packs[number]))
            half = len(packs[largest]) // 2
            if not half:
                raise UserError(f"{len(packs)} packs of a sample each for {self._ranks} ranks: give more samples")
            packs.append(packs[largest][half:])
            del packs[largest][half:]
        return packs


def _processes() -> int:
    """Return how many processes train together, by `torch.distributed`; 1 where that is not initialized."""
    distributed = sys.modules.get("torch.distributed")
    return distributed.get_world_size() if distributed and distributed.is_initialized() else 1


class PacksOfTrainer:
    """A mixin in front of `Trainer` or `SFTTrainer`, which then read `packs`, a `DataLoader`, as it is."""

    def get_train_dataloader(self: Any) -> Any:
        """Return the trainer's `packs`, prepared so that each process takes its own. Raises UserError without any."""
        if not hasattr(self, "packs"):
            raise UserError(f"{type(self).__name__}: has no packs; set trainer.packs, a DataLoader, before train()")
        return self.accelerator.prepare(self.packs)


def collate(samples: Sequence[Mapping[str, Any]], config: Any = None) -> dict[str, Any]:
    """Return a pack as a transformers model reads it, with a batch dimension of 1: no sample sees another.

    Args:
        samples: as its processor makes them, with `labels`.
        config: the model's (`model.config`), for those with positions or masks of their own: `partial(collate,
            config=model.config)`. Without it images of M-RoPE's models stand right, and all else of them is refused.

    Raises:
        UserError: as `join`; or a model that would compute something else on a pack than on its samples.
    """
    import torch

    packs = Packs("") if config is None else check_model(config)
    joined = join(samples, config)
    ends, longest = joined.pop("cu_seqlens"), joined.pop("max_seqlen")
    count, lengths = int(ends[-1]), ends.diff()
    kinds = [joined.pop(key, None) for key in ("mm_token_type_ids", "token_type_ids")]
    for key, value in joined.items():
        if value.dim() == 1 and len(value) == count and not is_of_media(key):
            joined[key] = value[None]
    if joined["position_ids"].dim() > 1 and len(joined["position_ids"]) > 1:
        axes = joined["position_ids"].reshape(-1, 1, count)
        words = torch.cat([torch.arange(length) for length in lengths.tolist()])[None, None]
        joined["position_ids"] = torch.cat([words.to(axes), axes]) if len(axes) == 3 else axes
    if config is not None:
        check_rotation(config, longest)
        masks = image_masks(config, joined["input_ids"][0].cpu().numpy(), lengths.tolist())
        joined |= {"attention_mask": {name: torch.from_numpy(mask) for name, mask in masks.items()}} if masks else {}
    elif kinds[1] is not None and kinds[1].any():
        raise UserError(f"token_type_ids: what tokens see is the model's own: {REMEDY}")
    if packs.boundaries:  # other models' ViTs would apply them to patches
        joined |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    if packs.linear_attention:
        joined["seq_idx"] = torch.arange(len(lengths)).repeat_interleave(lengths)[None].int()
    return {**joined, "use_cache": False}
