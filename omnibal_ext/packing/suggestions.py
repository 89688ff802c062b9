"""Suggestions if packs of a corpus cannot have both little waiting and iterations that look like the corpus.

Each suggestion is tried on a subset of the samples, so its effect and cost are measured.
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.summary import Summary
from omnibal_ext.packing.options import PackOptions

RANDOM = 1.1
"""Spread of iterations, relative to a random order of samples, above which it is reported."""
MISSING = 0.01
"""Fraction of iterations without a kind, minus that of a random order, above which it is reported."""
TOO_LONG = 1.02
"""Ratio of waiting to the allowed fraction above which it is reported."""
TRIED_SAMPLES, TRIED_ITERATIONS = 20_000, 20  # at least so many are tried, if the corpus has them
FEW = 3  # too few iterations to measure a spread
BETTER = 0.9
"""A suggestion must reduce a measure that is too high to this fraction or less."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """Flags, and the result of trying them on a subset of the samples."""

    flags: str
    price: str
    wait: float
    spread: float
    """Relative to a random order of samples: of sizes or sources, the larger one."""
    kinds_missing: float


def shortfalls(summary: Summary, options: PackOptions) -> list[str]:
    """Return a sentence for each measure that is too high; none for a baseline."""
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
            "sources as in a random order of samples"
        )
    if summary.kinds_missing > summary.kinds_missing_random + MISSING:
        found.append(
            f"{summary.kinds_missing:.1%} of iterations have no sample of some kind "
            f"(in a random order {summary.kinds_missing_random:.1%})"
        )
    return found


def suggestions(corpus: Corpus, options: PackOptions, costs: PackCosts, summary: Summary) -> list[Suggestion]:
    """Try changes on a subset of the corpus, whose packing `summary` measures; return those that help.

    1. Allow more waiting.
    2. Run four times as many microbatches in an iteration.
    3. Enlarge packs by half, which leaves more room in each.
    """
    longer = max(0.008, 2 * options.wait)
    larger = replace(options, vit_budget=options.vit_budget * 3 // 2, llm_budget=options.llm_budget * 3 // 2)
    changes = [
        (f"--wait {longer:g}", "device time", replace(options, wait=longer)),
        (
            f"--micro-batches {4 * options.micro_batches}",
            "a global batch of four times as many packs",
            replace(options, micro_batches=4 * options.micro_batches),
        ),
        (
            f"--vit-budget {larger.vit_budget} --llm-budget {larger.llm_budget}",
            "memory: packs larger by half",
            larger,
        ),
    ]
    subset = _subset(corpus, 4 * TRIED_ITERATIONS * summary.samples // summary.iterations)
    before, *tried = (
        _tried(subset, replace(change, epochs=1, narrow_first=0), costs)
        for change in (options, *(change for _, _, change in changes))
    )
    found = [
        _suggestion(*change[:2], each) for change, each in zip(changes, tried, strict=True) if each.iterations > FEW
    ]
    return [suggestion for suggestion in found if _helps(suggestion, _suggestion("", "", before))]


def _subset(corpus: Corpus, least: int) -> Corpus:
    """Return a random subset of at least `least` samples, of all sources."""
    count = len(corpus.sizes)
    some = min(count, max(TRIED_SAMPLES, least))
    chosen = np.sort(np.random.default_rng(0).choice(count, some, replace=False))
    samples = np.bincount(corpus.source_numbers()[chosen], minlength=len(corpus.sources)).tolist()
    sources = (replace(source, samples=n) for source, n in zip(corpus.sources, samples, strict=True))
    groups, lines, supervised = (
        None if values is None else values[chosen] for values in (corpus.groups, corpus.lines, corpus.supervised)
    )
    kept = None if corpus.kept is None else corpus.kept[chosen]
    return Corpus(corpus.sizes.take(chosen), tuple(sources), groups, lines, supervised, kept)


def _tried(subset: Corpus, options: PackOptions, costs: PackCosts) -> Summary:
    with tempfile.TemporaryDirectory() as folder:
        return build_index(subset, Path(folder) / "packs", options, costs=costs)[1]


def _suggestion(flags: str, price: str, summary: Summary) -> Suggestion:
    spread = max(summary.spread_sizes, summary.spread_sources)
    return Suggestion(flags, price, summary.wait, spread, summary.kinds_missing)


def _helps(suggestion: Suggestion, before: Suggestion) -> bool:
    """Whether measures that are too high improve: missing kinds and spread, or if neither is, the wait."""
    if before.kinds_missing > MISSING and suggestion.kinds_missing <= BETTER * before.kinds_missing:
        return True
    if before.spread > RANDOM:
        return suggestion.spread <= BETTER * before.spread
    return suggestion.wait <= BETTER * before.wait
