"""Sizes to a packed index, in one call: what `tools/pack_data.py` does."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.packing import metrics
from omnibal_ext.packing.balanced import pack_balanced
from omnibal_ext.packing.baselines import pack_random
from omnibal_ext.packing.dispatch import LAST_ITERATION, PackStream, epoch_iterations
from omnibal_ext.packing.index import PackedIndex, write_index
from omnibal_ext.packing.isf import pack_isf
from omnibal_ext.packing.level import level_groups
from omnibal_ext.packing.packs import ATTENTION, TILES, TOKENS, Packs, pack_loads
from omnibal_ext.sizes import Sizes

METHODS = ("balanced", "isf", "random")
PADDED_METHODS = ("random",)


@dataclass(frozen=True, slots=True)
class PackOptions:
    """How to pack."""

    method: str = "balanced"
    vit_budget: int = 0
    """Most tiles of a pack, and of a sample."""
    llm_budget: int = 0
    """Most tokens of a pack, and of a sample. Padded methods hold both budgets for samples, not for packs."""
    micro_batches: int = 1
    data_parallel_size: int = 1
    samples_per_pack: int = 4
    """Of the padded methods."""
    last_iteration: str = "next_epoch"
    """What fills the incomplete last iteration of an epoch: packs of the next epoch, or zero-weight "empty" packs."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises UserError for a value out of range."""
        if self.method not in METHODS:
            raise UserError(f"--method {self.method}: must be one of {', '.join(METHODS)}")
        if self.last_iteration not in LAST_ITERATION:
            raise UserError(f"--last-iteration {self.last_iteration}: must be one of {', '.join(LAST_ITERATION)}")
        for name in ("llm_budget", "micro_batches", "data_parallel_size", "samples_per_pack"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be 1 or more")
        if self.vit_budget < 0 or self.seed < 0:
            raise UserError("--vit-budget and --seed must be 0 or more")

    @property
    def pad(self) -> bool:
        """Whether the samples of a pack are padded to the longest one."""
        return self.method in PADDED_METHODS

    @property
    def global_batch(self) -> int:
        """Packs of one iteration."""
        return self.data_parallel_size * self.micro_batches


@dataclass(frozen=True, slots=True)
class Summary:
    """What came out; the fields that `tools/pack_data.py --json` prints."""

    packs: int
    samples: int
    rejected: int
    lower_bound_packs: int
    vit_budget: int
    llm_budget: int
    pad_ratio: float
    dist_ratio_vit: float
    dist_ratio_llm: float
    dist_ratio_attention: float
    iterations: int
    filled_packs: int
    """Places of the last iteration filled from the next epoch or with empty packs."""
    samples_per_pack: float
    longest_tiles: int
    longest_tokens: int
    seconds: float
    samples_per_second: float
    rejected_by_reason: dict[str, int] = field(default_factory=dict)


def build_index(
    sizes: Sizes,
    output_dir: str | Path,
    options: PackOptions,
    built_from: Mapping[str, Any] | None = None,
    sources: Sequence[tuple[str, int]] = (),
) -> tuple[PackedIndex, Summary]:
    """Pack a corpus and write its index.

    `built_from` goes into the manifest as it is; `sources` names the files of the corpus and their numbers of samples.

    Raises:
        UserError: no sample fits the budgets, or `output_dir` holds something else.
    """
    begin = time.perf_counter()
    reasons = reject_reasons(sizes, options)
    samples = np.flatnonzero(reasons == 0)
    if len(samples) == 0:
        raise UserError(f"none of {len(sizes)} samples fits {options.vit_budget} tiles and {options.llm_budget} tokens")
    kept = sizes if len(samples) == len(sizes) else sizes.take(samples)
    packs = pack(kept, options)
    loads = pack_loads(packs, kept, options.pad)
    order = arrange(loads, options)
    packs, loads = packs.reordered(order), loads[order]
    padding = metrics.pad_ratio(packs, kept, options.pad)
    if kept is not sizes:
        packs = Packs(packs.pack_offsets, samples[packs.sample_ids])
    longest = loads.max(axis=0)
    manifest = {
        **asdict(options),
        "vit_budget": int(longest[TILES]) if options.pad else options.vit_budget,
        "llm_budget": int(longest[TOKENS]) if options.pad else options.llm_budget,
        "global_batch": options.global_batch,
        "pad": options.pad,
        "epoch_packs": [len(packs)],
        "rejected": len(sizes) - len(samples),
        "built_from": dict(built_from or {}),
    }
    index = write_index(output_dir, packs, loads, manifest, _rejects(sizes, reasons, options, sources))
    seconds = time.perf_counter() - begin
    names = {reason: int(np.sum(reasons == number)) for number, reason in REASONS.items()}
    stream = PackStream(index, options.data_parallel_size, options.micro_batches)
    iterations = epoch_iterations(stream)
    ratios = [metrics.dist_ratio(metrics.rank_loads(iterations, loads[:, load])) for load in (TILES, TOKENS, ATTENTION)]
    return index, Summary(
        packs=len(packs),
        samples=len(samples),
        rejected=len(sizes) - len(samples),
        lower_bound_packs=metrics.lower_bound_packs(kept, index.vit_budget, index.llm_budget),
        vit_budget=index.vit_budget,
        llm_budget=index.llm_budget,
        pad_ratio=padding,
        dist_ratio_vit=ratios[TILES],
        dist_ratio_llm=ratios[TOKENS],
        dist_ratio_attention=ratios[ATTENTION],
        iterations=len(iterations),
        filled_packs=iterations.size - len(packs),
        samples_per_pack=len(samples) / len(packs),
        longest_tiles=int(longest[TILES]),
        longest_tokens=int(longest[TOKENS]),
        seconds=seconds,
        samples_per_second=len(samples) / seconds,
        rejected_by_reason={reason: count for reason, count in names.items() if count},
    )


def pack(sizes: Sizes, options: PackOptions) -> Packs:
    """Pack samples that all fit the budgets, by the method of `options`."""
    if options.method == "balanced":
        return pack_balanced(sizes, options.vit_budget, options.llm_budget, seed=options.seed)
    if options.method == "random":
        return pack_random(sizes, options.samples_per_pack, options.seed)
    return pack_isf(sizes, options.vit_budget, options.llm_budget, seed=options.seed)


def arrange(loads: NDArray[np.int64], options: PackOptions) -> NDArray[np.int64]:
    """Return packs in the order in which they run: level groups for balanced packs, at random for the others."""
    if options.method == "balanced":
        return level_groups(loads, options.data_parallel_size, options.micro_batches, options.seed)
    return np.random.default_rng(options.seed).permutation(len(loads))


REASONS = {1: "too many tiles", 2: "too many tokens"}


def reject_reasons(sizes: Sizes, options: PackOptions) -> NDArray[np.int8]:
    """Return the number in `REASONS` why each sample cannot be packed, 0 where it can: int8 [N]."""
    reasons = np.zeros(len(sizes), np.int8)
    reasons[sizes.tokens > options.llm_budget] = 2
    reasons[sizes.tiles > options.vit_budget] = 1
    return reasons


def _rejects(
    sizes: Sizes, reasons: NDArray[np.int8], options: PackOptions, sources: Sequence[tuple[str, int]]
) -> list[dict[str, Any]]:
    """Say for each sample left out what it is, where it came from and why."""
    ends = np.cumsum([count for _, count in sources])
    lines = []
    for sample in np.flatnonzero(reasons).tolist():
        source = int(np.searchsorted(ends, sample, side="right"))
        place = {"file": sources[source][0], "row": sample - int(np.append(0, ends)[source])} if len(ends) else {}
        tiles, tokens = int(sizes.tiles[sample]), int(sizes.tokens[sample])
        detail = f"{tiles} tiles of {options.vit_budget}, {tokens} tokens of {options.llm_budget}"
        reason = REASONS[int(reasons[sample])]
        lines.append({"sample": sample, **place, "tiles": tiles, "tokens": tokens, "reason": reason, "detail": detail})
    return lines
