"""What a packed index is worth, measured before any GPU is booked."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing import metrics
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.dispatch import PackStream, epoch_iterations
from omnibal_ext.packing.index import PackedIndex
from omnibal_ext.packing.least import least_spread
from omnibal_ext.packing.level import WAIT_ENOUGH
from omnibal_ext.packing.packs import ATTENTION, TILES, TOKENS, Packs
from omnibal_ext.packing.teach import missing_kinds, pack_features, spread_against_random

Ints = NDArray[np.int64]


def reject_names(budgets: Iterable[str]) -> dict[int, str]:
    """Return the reasons why a sample is left out, by number; further `budgets` count from 3."""
    return {number: f"too many {name}" for number, name in enumerate(("tiles", "tokens", *budgets), 1)}


@dataclass(frozen=True, slots=True)
class Summary:
    """What came out; the fields that `tools/pack_data.py --json` prints. Counts and ratios are those of epoch 0."""

    packs: int
    samples: int
    """Samples packed; one that a weight repeats counts each time."""
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
    tokens_per_iteration: float
    wasted_work: float
    """Share of rank-time lost to padding and to waiting for the fullest rank, the mean of tiles and tokens."""
    wait: float
    """Share of device time spent waiting for the fullest rank of each part of the model, in seconds of the costs."""
    teach_sizes: float
    """Spread over iterations of sizes and supervised tokens, over that of a random order; the largest of them."""
    teach_sizes_least: float
    """What `teach_sizes` cannot fall below in any order of these packs that waits as long, or 3 thousandths."""
    teach_sources: float
    """The same of the shares of sources and of text-only samples."""
    kinds_missing: float
    """Share of iterations without any sample of the kind (text-only, or of a source) that is missing most."""
    kinds_missing_random: float
    """The same, expected of a random order."""
    seconds: float
    samples_per_second: float
    rejected_by_reason: dict[str, int]
    sources: list[dict[str, Any]]


def summarise(index: PackedIndex, corpus: Corpus, reasons: NDArray[np.int8], seconds: float) -> Summary:
    """Measure epoch 0 of an index; `reasons` is 0 for samples that were packed."""
    count = int(index.manifest["epoch_packs"][0])
    packs = Packs(index.pack_offsets[: count + 1], index.sample_ids[: index.pack_offsets[count]])
    loads = np.asarray(index.loads)
    packed = corpus.sizes.take(packs.sample_ids)
    iterations = epoch_iterations(
        PackStream(index, index.manifest["data_parallel_size"], index.manifest["micro_batches"])
    )
    whole = iterations[((iterations >= 0) & (iterations < count)).all(axis=(1, 2))].reshape(-1, index.global_batch)
    features = pack_features(corpus, packs, np.asarray(loads[:count]), index.load_names)
    spreads = spread_against_random(whole, features.values)
    sizes = len(features.names) - len(features.kinds)
    missing, expected = missing_kinds(whole, features.has)
    worst = int(np.argmax(missing - expected)) if len(missing) else -1
    seconds_of_packs = index.seconds(np.arange(index.num_packs))
    waited = metrics.wait(metrics.rank_loads(iterations, seconds_of_packs))
    ranks = [metrics.rank_loads(iterations, loads[:, load]) for load in (TILES, TOKENS, ATTENTION)]
    padding = float(1.0 - packed.tokens.sum() / loads[:count, TOKENS].sum())
    waiting = [metrics.waiting_share(load) for load in ranks[:2]]
    longest = loads[:count].max(axis=0)
    names = reject_names(index.manifest["budgets"])
    return Summary(
        packs=count,
        samples=len(packed),
        rejected=int(np.count_nonzero(reasons)),
        lower_bound_packs=metrics.lower_bound_packs(packed, index.vit_budget, index.llm_budget),
        vit_budget=index.vit_budget,
        llm_budget=index.llm_budget,
        pad_ratio=metrics.pad_ratio(packs, corpus.sizes, index.pad),
        dist_ratio_vit=metrics.dist_ratio(ranks[TILES]),
        dist_ratio_llm=metrics.dist_ratio(ranks[TOKENS]),
        dist_ratio_attention=metrics.dist_ratio(ranks[ATTENTION]),
        iterations=len(iterations),
        filled_packs=iterations.size - count,
        samples_per_pack=len(packed) / count,
        longest_tiles=int(longest[TILES]),
        longest_tokens=int(longest[TOKENS]),
        tokens_per_iteration=float(packed.tokens.sum() / len(iterations)),
        wasted_work=(waiting[TILES] + 1.0 - (1.0 - waiting[TOKENS]) * (1.0 - padding)) / 2,
        wait=waited,
        teach_sizes=float(spreads[:sizes].max()),
        teach_sizes_least=least_spread(
            whole.reshape(-1, *iterations.shape[1:]),
            loads[:count],
            seconds_of_packs[:count],
            index.costs.tile_seconds,
            max(WAIT_ENOUGH, waited),
        ),
        teach_sources=float(spreads[sizes:].max(initial=0.0)),
        kinds_missing=float(missing[worst]) if len(missing) else 0.0,
        kinds_missing_random=float(expected[worst]) if len(missing) else 0.0,
        seconds=seconds,
        samples_per_second=len(index.sample_ids) / seconds,
        rejected_by_reason={reason: int(np.sum(reasons == key)) for key, reason in names.items() if key in reasons},
        sources=_source_counts(corpus, packs.sample_ids, reasons),
    )


def _source_counts(corpus: Corpus, samples: Ints, reasons: NDArray[np.int8]) -> list[dict[str, Any]]:
    """Count for each source what came in, what an epoch packs and what was left out."""
    times = np.bincount(samples, minlength=len(corpus.sizes))
    counts, first = [], 0
    for source in corpus.sources:
        own = slice(first, first + source.samples)
        counts.append(
            {
                "source": source.name,
                "weight": source.weight,
                "samples": source.samples,
                "text_only": int(np.count_nonzero(corpus.sizes.tiles[own] == 0)),
                "rejected": int(np.count_nonzero(reasons[own])),
                "packed": int(times[own].sum()),
                "tiles": int(times[own] @ corpus.sizes.tiles[own]),
                "tokens": int(times[own] @ corpus.sizes.tokens[own]),
            }
        )
        first += source.samples
    return counts
