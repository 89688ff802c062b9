"""A corpus to a packed index, in one call: what `tools/pack_data.py` does."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.packing.balanced import pack_balanced
from omnibal_ext.packing.baselines import pack_device_group, pack_length_group, pack_random
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.dispatch import LAST_ITERATION
from omnibal_ext.packing.index import PackedIndex, write_index
from omnibal_ext.packing.isf import pack_isf
from omnibal_ext.packing.level import level_groups
from omnibal_ext.packing.packs import TILES, TOKENS, Packs, pack_loads
from omnibal_ext.packing.summary import REASONS, Summary, summarise
from omnibal_ext.sizes import Sizes

Ints = NDArray[np.int64]

PADDED_METHODS = ("random", "length_group", "device_group")
METHODS = ("balanced", "isf", *PADDED_METHODS)
OVERSIZE = ("reject", "alone")


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
    oversize: str = "reject"
    """What becomes of a sample over budget: left out and written down, or kept alone in a pack of its own size."""
    epochs: int = 1
    """Epochs that are packed apart; a stream goes through them and starts again."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises UserError for a value out of range."""
        for name, choices in (("method", METHODS), ("last_iteration", LAST_ITERATION), ("oversize", OVERSIZE)):
            if getattr(self, name) not in choices:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"{flag} {getattr(self, name)}: must be one of {', '.join(choices)}")
        for name in ("llm_budget", "micro_batches", "data_parallel_size", "samples_per_pack", "epochs"):
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


def build_index(
    corpus: Corpus | Sizes,
    output_dir: str | Path,
    options: PackOptions,
    built_from: Mapping[str, Any] | None = None,
) -> tuple[PackedIndex, Summary]:
    """Pack a corpus and write its index; `built_from` goes into the manifest as it is.

    1. Leave out (or set apart) the samples that fit no pack.
    2. For each epoch: repeat samples by weight, pack them, order the packs by iteration.
    3. Write the index, with a line for every sample left out.

    Raises:
        UserError: no sample fits the budgets, or `output_dir` holds something else.
    """
    begin = time.perf_counter()
    corpus = Corpus.of(corpus) if isinstance(corpus, Sizes) else corpus
    reasons = reject_reasons(corpus.sizes, options)
    rejected = reasons > 0 if options.oversize == "reject" else np.zeros(len(reasons), np.bool_)
    if rejected.all():
        limits = f"{options.vit_budget} tiles and {options.llm_budget} tokens"
        raise UserError(f"none of {len(rejected)} samples fits {limits}: raise the budgets")
    epochs = [_pack_epoch(corpus, reasons, options, options.seed + epoch) for epoch in range(options.epochs)]
    packs = Packs.concatenate([epoch for epoch, _ in epochs])
    loads = np.concatenate([loads for _, loads in epochs])
    longest = loads.max(axis=0)
    roomy = options.pad or options.oversize == "alone"  # packs may exceed the budgets asked for
    manifest = {
        **asdict(options),
        "vit_budget": int(longest[TILES]) if roomy else options.vit_budget,
        "llm_budget": int(longest[TOKENS]) if roomy else options.llm_budget,
        "sample_vit_budget": options.vit_budget,
        "sample_llm_budget": options.llm_budget,
        "global_batch": options.global_batch,
        "pad": options.pad,
        "epoch_packs": [len(epoch) for epoch, _ in epochs],
        "rejected": int(rejected.sum()),
        "sources": [asdict(source) for source in corpus.sources],
        "built_from": dict(built_from or {}),
    }
    index = write_index(output_dir, packs, loads, manifest, _rejects(corpus, reasons * rejected, options))
    seconds = time.perf_counter() - begin
    return index, summarise(index, corpus, reasons * rejected, seconds)


def pack(sizes: Sizes, options: PackOptions, seed: int | None = None) -> Packs:
    """Pack samples that all fit the budgets, by the method of `options`."""
    seed = options.seed if seed is None else seed
    packers: dict[str, Callable[[], Packs]] = {
        "balanced": lambda: pack_balanced(sizes, options.vit_budget, options.llm_budget, seed=seed),
        "isf": lambda: pack_isf(sizes, options.vit_budget, options.llm_budget, seed=seed),
        "random": lambda: pack_random(sizes, options.samples_per_pack, seed),
        "length_group": lambda: pack_length_group(sizes, options.samples_per_pack, seed),
        "device_group": lambda: pack_device_group(
            sizes, options.samples_per_pack, options.data_parallel_size, options.micro_batches, seed
        ),
    }
    return packers[options.method]()


def arrange(loads: Ints, options: PackOptions, seed: int | None = None) -> Ints:
    """Return packs [P] in the order in which they run: level groups for balanced packs, else iterations at random."""
    seed = options.seed if seed is None else seed
    if options.method == "balanced":
        return level_groups(loads, options.data_parallel_size, options.micro_batches, seed)
    generator = np.random.default_rng((seed, 1))
    if options.method in ("isf", "random"):
        return generator.permutation(len(loads))
    whole = len(loads) // options.global_batch * options.global_batch
    groups = np.arange(whole).reshape(-1, options.global_batch)
    return np.concatenate([generator.permutation(groups).ravel(), np.arange(whole, len(loads))])


def reject_reasons(sizes: Sizes, options: PackOptions) -> NDArray[np.int8]:
    """Return the number in `REASONS` why each sample cannot be packed, 0 where it can: int8 [N]."""
    reasons = np.zeros(len(sizes), np.int8)
    reasons[sizes.tokens > options.llm_budget] = 2
    reasons[sizes.tiles > options.vit_budget] = 1
    return reasons


def _pack_epoch(corpus: Corpus, reasons: NDArray[np.int8], options: PackOptions, seed: int) -> tuple[Packs, Ints]:
    """Pack one epoch, each group for itself; return packs of corpus samples in dispatch order, and their loads."""
    samples = corpus.epoch_samples(seed)
    oversize = samples[reasons[samples] > 0] if reasons.any() else samples[:0]
    if len(oversize):
        samples = samples[reasons[samples] == 0]
    parts = []
    for members in _members(corpus, samples):
        packs = pack(corpus.sizes.take(members), options, seed)
        parts.append(Packs(packs.pack_offsets, members[packs.sample_ids]))
    if options.oversize == "alone":
        parts.append(Packs(np.arange(len(oversize) + 1), oversize))
    packs = parts[0] if len(parts) == 1 else Packs.concatenate(parts)
    loads = pack_loads(packs, corpus.sizes, options.pad)
    order = arrange(loads, options, seed)
    return packs.reordered(order), loads[order]


def _members(corpus: Corpus, samples: Ints) -> Iterator[Ints]:
    """Yield the samples that may share packs."""
    if corpus.groups is None:
        yield samples
        return
    of_sample = corpus.groups[samples]
    order = np.argsort(of_sample, kind="stable")
    borders = np.flatnonzero(np.diff(of_sample[order])) + 1
    yield from np.split(samples[order], borders)


def _rejects(corpus: Corpus, reasons: NDArray[np.int8], options: PackOptions) -> Iterator[dict[str, Any]]:
    """Say for each sample left out what it is, where it came from and why."""
    for sample in np.flatnonzero(reasons).tolist():
        tiles, tokens = int(corpus.sizes.tiles[sample]), int(corpus.sizes.tokens[sample])
        yield {
            "sample": sample,
            **corpus.place(sample),
            "tiles": tiles,
            "tokens": tokens,
            "reason": REASONS[int(reasons[sample])],
            "detail": f"{tiles} tiles of {options.vit_budget}, {tokens} tokens of {options.llm_budget}",
        }
