"""Measures of a packed index, before a GPU is used."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.large_arrays import PIECE, in_pieces, pieces, release
from omnibal_ext.modalities.modality import FURTHER, FURTHER_SIZES, Modality
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.index.dispatch import EMPTY_PACK, PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering import metrics
from omnibal_ext.packing.ordering.equalize_packs import MOST_STEPS, STEPS_A_SECOND
from omnibal_ext.packing.ordering.order_packs import MANY
from omnibal_ext.packing.ordering.spread import (
    iteration_spread,
    missing_kinds,
    pack_features,
    random_spread,
    relative_to,
)
from omnibal_ext.packing.packs import ATTENTION, TILES, TOKENS, PackList, pack_loads
from omnibal_ext.packing.shard_loads import tokens_cut

HELPS = "more --micro-batches help most, then a larger --wait, or packs that hold more samples (docs/packing-limits.md)"
BOUND = "packs that cost much set the wait: more --micro-batches help most, a larger --wait hardly mixes more"
EFFORT_HELPS = "a larger --seconds, up to {:.2g}, helps first, as samples and packs then change places more often; "
MOST_SAMPLES = 200_000  # samples used to estimate the spread of a random order
MOST_PACKS, RUNS = 1 << 18, 64  # packs used to measure the spread of iterations, and in how many places of many packs
RANDOM = 1.1  # spread of iterations, relative to a random order of samples, above which it is reported
MISSING = 0.01  # fraction of iterations without a kind, minus that of a random order, above which it is reported
BOUNDED = 2.0  # ratio of waiting to the allowed fraction above which more of it hardly mixed what was tried
TOO_LONG = 1.02  # ratio of waiting to the allowed fraction above which it is reported


def reject_names(budgets: Iterable[str]) -> dict[int, str]:
    """Return the reasons for leaving a sample out by their numbers: 1 tiles, 2 tokens, from 3 on further `budgets`."""
    return {number: f"too many {name}" for number, name in enumerate(("tiles", "tokens", *budgets), 1)}


@dataclass(frozen=True, slots=True)
class FurtherSize:
    """Figures of a size whose budget is not in every index, such as mel frames."""

    budget: int = 0
    dist_ratio: float = 0.0
    longest: int = 0


@dataclass(frozen=True, slots=True)
class Summary:
    """Measures of a packing, as `omnibal pack --json` prints them. Counts and ratios are those of epoch 0."""

    packs: int
    samples: int
    """Samples packed; repeated ones count each time."""
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
    """Slots of the last iteration (with wide packs: of all) that are empty or have packs of the next epoch."""
    seats: int
    """Slots that packs occupy: a pack takes as many as its width."""
    tokens_in_wide_packs: float
    """Fraction of tokens in packs wider than a rank (CR of HBP, whose ranks exchange complete packs)."""
    tokens_exchanged: float
    """Fraction of tokens in samples that are cut between ranks: only these are exchanged."""
    tokens_per_rank: float
    """Mean tokens per rank and iteration (Ave-T of HBP)."""
    samples_per_pack: float
    longest_tiles: int
    longest_tokens: int
    wait: float
    """Fraction of device time spent waiting for the slowest rank in each part of the model (`PackCosts`)."""
    wait_last: float
    """Share of time waited in the epoch's last iteration."""
    spread_sizes: float
    """Spread (standard deviation over iterations) of sizes and supervised tokens, divided by that of a random order of
    samples: the largest of these ratios."""
    spread_sources: float
    """Spread, as `spread_sizes`, of numbers of samples by source, and of text-only ones."""
    spread_most: str
    """The size or source of the largest of all these ratios."""
    kinds_missing: float
    """Fraction of iterations without any sample of one kind (text-only, with images, a source): that missing most."""
    kinds_missing_random: float
    """Share `kinds_missing` as expected in a random order of samples."""
    seconds: float
    samples_per_second: float
    compile_seconds: float
    """Numba's compilation, once per machine; not in `seconds`."""
    rejected_by_reason: dict[str, int]
    sources: list[dict[str, Any]]
    further: dict[Modality, FurtherSize] = field(default_factory=dict)
    """Figures of modalities whose budgets are not in every index."""

    def to_record(self) -> dict[str, Any]:
        """Return what `--json` prints: all figures by name; 0 of modalities that the corpus has none of."""
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "further"}
        for one in FURTHER:
            of = self.further.get(one, FurtherSize())
            found |= {one.budget: of.budget, one.dist_ratio: of.dist_ratio, f"longest_{one.size}": of.longest}
        return found


def shortfalls(summary: Summary, options: PackOptions) -> list[str]:
    """Return a sentence for each measure that is too high, and last what helps; none for a baseline."""
    found: list[str] = []
    if options.method != "balanced" or summary.iterations < 2:
        return found
    if summary.wait > TOO_LONG * options.wait:
        found.append(
            f"ranks wait for {summary.wait:.4f} of the time, more than --wait {options.wait:g} "
            f"(the epoch's last iteration {summary.wait_last:.4f})"
        )
    if max(summary.spread_sizes, summary.spread_sources) > RANDOM:
        found.append(
            f"iterations differ {summary.spread_sizes:.2f} times as much in sizes and {summary.spread_sources:.2f} in "
            f"sources as in a random order of samples, most in {summary.spread_most}"
        )
    if summary.kinds_missing > summary.kinds_missing_random + MISSING:
        found.append(
            f"{summary.kinds_missing:.1%} of iterations have no sample of some kind "
            f"(in a random order {summary.kinds_missing_random:.1%})"
        )
    enough = MOST_STEPS * min(summary.packs, MANY) / STEPS_A_SECOND  # seconds after which more change next to nothing
    helps = BOUND if options.micro_batches == 1 and summary.wait > BOUNDED * options.wait else HELPS
    helps = helps if options.seconds >= enough else EFFORT_HELPS.format(enough) + helps
    return [*found, helps] if found else []


def summarise(
    index: PackedIndex,
    corpus: Corpus,
    reasons: NDArray[np.int8],
    spent: tuple[float, float],
) -> Summary:
    """Compute the measures of epoch 0 of an index, from loads and costs.

    Args:
        reasons: why each sample was left out (`reject_names`), 0 if packed, [N].
        spent: seconds of packing and of compiling.
    """
    count = int(index.manifest["epoch_packs"][0])
    packs = PackList(index.pack_offsets[: count + 1], index.sample_ids[: index.pack_offsets[count]])
    widths = None if index.wide is None else np.asarray(index.wide.pack_widths[:count])
    stream = PackStream(index, index.manifest["data_parallel_size"], index.manifest["micro_batches"])
    iterations, seats = stream.iterations_per_epoch, count if widths is None else int(widths.sum())
    fullest, mean, ratios = _measured(index, stream)
    longest = np.max([each.max(axis=0) for (each,) in in_pieces(index.loads[:count])], axis=0)
    names, sources = reject_names(index.manifest["budgets"]), _source_counts(corpus, packs.sample_ids, reasons)
    units = {size: sum(source[size] for source in sources) for size in index.budgets}
    left_out = np.sum([np.bincount(each, minlength=len(names) + 1) for (each,) in in_pieces(reasons)], axis=0)
    in_wide = exchanged = 0.0
    if widths is not None:
        tokens = np.asarray(index.loads[:count, TOKENS])
        in_wide = float(tokens[widths > 1].sum() / tokens.sum())
        exchanged = float(tokens_cut(packs, corpus.sizes, widths).sum() / tokens.sum())
    further = dict[Modality, FurtherSize]()
    for one in (one for one in FURTHER if one.size in index.budgets):
        column = index.load_names.index(one.size)
        further[one] = FurtherSize(index.budgets[one.size], float(ratios[:, column].mean()), int(longest[column]))
    return Summary(
        packs=count,
        samples=len(packs.sample_ids),
        rejected=int(left_out[1:].sum()),
        lower_bound_packs=metrics.fewest_packs(units, index.budgets),
        vit_budget=index.vit_budget,
        llm_budget=index.llm_budget,
        pad_ratio=metrics.pad_ratio(packs, corpus.sizes, index.pad),
        dist_ratio_vit=float(ratios[:, TILES].mean()),
        dist_ratio_llm=float(ratios[:, TOKENS].mean()),
        dist_ratio_attention=float(ratios[:, ATTENTION].mean()),
        iterations=iterations,
        filled_packs=iterations * index.global_batch - seats,
        seats=seats,
        tokens_in_wide_packs=in_wide,
        tokens_exchanged=exchanged,
        tokens_per_rank=units["tokens"] / (iterations * int(index.manifest["data_parallel_size"])),
        samples_per_pack=len(packs.sample_ids) / count,
        longest_tiles=int(longest[TILES]),
        longest_tokens=int(longest[TOKENS]),
        wait=metrics.wait_of(fullest, mean),
        wait_last=metrics.wait_of(fullest[-1:], mean[-1:]),
        **_spreads(index, corpus, packs, stream),
        seconds=spent[0],
        samples_per_second=len(index.sample_ids) / spent[0],
        compile_seconds=spent[1],
        rejected_by_reason={reason: int(left_out[key]) for key, reason in names.items() if left_out[key]},
        sources=sources,
        further=further,
    )


def _measured(index: PackedIndex, stream: PackStream) -> tuple[Floats, Floats, Floats]:
    """Return seconds of each iteration's fullest and mean rank, [I, parts], and its `dist_ratios`, [I, K]."""
    found, step = [], -(-PIECE // index.global_batch)
    for first in range(0, stream.iterations_per_epoch, step):
        packs = stream.iterations(first, min(first + step, stream.iterations_per_epoch))
        numbers = np.where(packs >= 0, np.arange(packs.size).reshape(packs.shape), EMPTY_PACK)
        seconds = metrics.rank_loads(numbers, index.seconds(packs.ravel()))
        loads = metrics.rank_loads(numbers, np.asarray(index.rank_loads[packs.ravel()]))
        found.append((seconds.max(axis=1), seconds.mean(axis=1), metrics.dist_ratios(loads)))
        release(index.loads)
    fullest, mean, ratios = (np.concatenate(each) for each in zip(*found, strict=True))
    return fullest, mean, ratios


def _spreads(index: PackedIndex, corpus: Corpus, packs: PackList, stream: PackStream) -> dict[str, Any]:
    """Return the fields `spread_*` and `kinds_*`, of complete iterations, or beyond `MOST_PACKS` packs of some."""
    count, samples, total = len(packs), len(packs.sample_ids), stream.iterations_per_epoch
    runs, batch = [(0, total)], index.global_batch if index.wide is None else count / total
    if in_part := count > MOST_PACKS and index.wide is None:
        each = -(-total * MOST_PACKS // (count * RUNS))
        runs = [(first, first + each) for first in np.linspace(0, total - each, RUNS).astype(int).tolist()]
    iterations = np.concatenate([stream.iterations(first, end) for first, end in runs])
    complete, loads = _complete_iterations(index, iterations, count), index.loads[:count]
    if in_part:
        numbers = np.unique(complete)
        packs, loads, complete = packs.reordered(numbers), loads[numbers], np.searchsorted(numbers, complete)
        held = np.unique(packs.sample_ids)
        corpus, packs = corpus.take(held), PackList(packs.pack_offsets, np.searchsorted(held, packs.sample_ids))
    features = pack_features(corpus, packs, np.asarray(loads))
    sampled = packs.sample_ids[:: -(-len(packs.sample_ids) // MOST_SAMPLES)]
    alone = PackList(np.arange(len(sampled) + 1), sampled)
    of_samples = pack_features(corpus, alone, pack_loads(alone, corpus.sizes, index.pad))
    drawn = samples / count * batch
    spread = _spread_of(index, complete, features.values)
    by_samples = relative_to(spread, random_spread(of_samples.values, drawn, samples))
    sizes = features.sizes
    missing, expected = (
        missing_kinds(complete, _of_seats(index, features.has)),
        (1 - of_samples.has.mean(axis=0)) ** drawn,
    )
    worst = int(np.argmax(missing - expected)) if len(missing) else -1
    return {
        "spread_sizes": float(by_samples[:sizes].max()),
        "spread_sources": float(by_samples[sizes:].max(initial=0.0)),
        "spread_most": [*index.load_names, *features.names][int(by_samples.argmax())],
        "kinds_missing": float(missing[worst]) if len(missing) else 0.0,
        "kinds_missing_random": float(expected[worst]) if len(missing) else 0.0,
    }


def _complete_iterations(index: PackedIndex, iterations: Ints, count: int) -> Ints:
    """Return those of `iterations` whose packs are all among the first `count`, [I, B]; if packs may be wide, all."""
    if index.wide is not None:
        return iterations.reshape(len(iterations), -1)
    return iterations[((iterations >= 0) & (iterations < count)).all(axis=(1, 2))].reshape(-1, index.global_batch)


def _spread_of(index: PackedIndex, complete: Ints, values: Floats) -> Floats:
    """Return the standard deviation over iterations of their sums of `values` [P, F]: [F]."""
    if index.wide is None or len(complete) < 2:
        return iteration_spread(complete, values)
    spread: Floats = _of_seats(index, values)[complete].sum(axis=1).std(axis=0)
    return spread


def _of_seats(index: PackedIndex, values: NDArray[Any]) -> NDArray[Any]:
    """Return `values` [P, F] divided over the slots of each pack, and a last row 0 for empty slots."""
    if index.wide is None:
        return values
    widths = index.wide.pack_widths[: len(values), None]
    each = values if values.dtype == np.bool_ else values / widths
    return np.concatenate([each, np.zeros_like(each[:1])])


def _source_counts(corpus: Corpus, samples: Ints, reasons: NDArray[np.int8]) -> list[dict[str, Any]]:
    """Return for each source its samples, those packed in an epoch, and those left out."""
    there = len(reasons) if corpus.kept is None else np.count_nonzero(corpus.kept)
    is_whole = corpus.is_plain and len(samples) == there - np.count_nonzero(reasons)
    times = None if is_whole else np.bincount(samples, minlength=len(corpus.sizes))
    sizes = ("tiles", "tokens", *(one for one in FURTHER_SIZES if one in corpus.sizes.more))
    names, counts, first = ("text_only", "rejected", "packed", *sizes), list[dict[str, Any]](), 0
    for source in corpus.sources:
        sums = np.zeros(len(names), np.int64)
        for piece in pieces(source.samples):
            rows = slice(first + piece.start, first + piece.stop)
            packed = (reasons[rows] == 0) & (corpus.kept is None or corpus.kept[rows]) if times is None else times[rows]
            columns = [corpus.sizes.of(name)[rows] for name in sizes]
            found = (np.count_nonzero(columns[0] == 0), np.count_nonzero(reasons[rows]), packed.sum())
            sums += [*found, *(packed.astype(np.int64) @ units for units in columns)]
            release(corpus.sizes.tiles, corpus.sizes.tokens)
        named = dict(zip(names, sums.tolist(), strict=True))
        counts.append({"source": source.name, "weight": source.weight, "samples": source.samples, **named})
        first += source.samples
    return counts
