"""What would help where a corpus forces a choice: ranks that wait, or iterations that do not look like the corpus.

Each choice is tried on a part of the samples, so what it brings and what it costs is measured, not guessed.
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
"""Iterations that differ more, over a random order of samples, are far from random."""
MISSING = 0.01
"""Share of iterations without a kind, beyond a random order's, that is worth a word."""
TOO_LONG = 1.02
"""So many times the share that may be waited, and more, is worth a word."""
TRIED_SAMPLES, TRIED_ITERATIONS = 20_000, 20  # so many are tried at least, where there are as many
FEW = 3  # iterations do not tell how much they differ
BETTER = 0.9
"""A choice is named where it brings a measure that is at fault to so much of what it was, or less."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Flags, and what came of them on a part of the samples."""

    flags: str
    price: str
    wait: float
    spread: float
    """Of sizes or sources, whichever is more, against a random order of samples."""
    kinds_missing: float


def faults(summary: Summary, options: PackOptions) -> list[str]:
    """Say in what an index falls short of both aims; of a baseline nothing is said."""
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


def choices(corpus: Corpus, options: PackOptions, costs: PackCosts, summary: Summary) -> list[Choice]:
    """Try what may help on a part of the corpus, of which `summary` was found; return what did.

    1. Wait longer.
    2. Run four times as many microbatches in an iteration.
    3. Make packs larger by half, which leaves more room in each.
    """
    longer = max(0.008, 2 * options.wait)
    larger = replace(options, vit_budget=options.vit_budget * 3 // 2, llm_budget=options.llm_budget * 3 // 2)
    ways = [
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
    part = _part(corpus, 4 * TRIED_ITERATIONS * summary.samples // summary.iterations)
    before, *tried = (
        _tried(part, replace(way, epochs=1, narrow_first=0), costs) for way in (options, *(way for _, _, way in ways))
    )
    found = [_choice(*way[:2], each) for way, each in zip(ways, tried, strict=True) if each.iterations > FEW]
    return [choice for choice in found if _helps(choice, _choice("", "", before))]


def _part(corpus: Corpus, least: int) -> Corpus:
    """Return some of the samples, of all sources, `least` or more if there are as many."""
    count = len(corpus.sizes)
    some = min(count, max(TRIED_SAMPLES, least))
    own = np.sort(np.random.default_rng(0).choice(count, some, replace=False))
    samples = np.bincount(corpus.source_numbers()[own], minlength=len(corpus.sources)).tolist()
    sources = (replace(source, samples=n) for source, n in zip(corpus.sources, samples, strict=True))
    groups, lines, supervised = (
        None if values is None else values[own] for values in (corpus.groups, corpus.lines, corpus.supervised)
    )
    kept = None if corpus.kept is None else corpus.kept[own]
    return Corpus(corpus.sizes.take(own), tuple(sources), groups, lines, supervised, kept)


def _tried(part: Corpus, options: PackOptions, costs: PackCosts) -> Summary:
    with tempfile.TemporaryDirectory() as folder:
        return build_index(part, Path(folder) / "packs", options, costs=costs)[1]


def _choice(flags: str, price: str, summary: Summary) -> Choice:
    spread = max(summary.spread_sizes, summary.spread_sources)
    return Choice(flags, price, summary.wait, spread, summary.kinds_missing)


def _helps(choice: Choice, before: Choice) -> bool:
    """Whether what is at fault becomes better: what is missing, how iterations differ, or, if neither, the wait."""
    if before.kinds_missing > MISSING and choice.kinds_missing <= BETTER * before.kinds_missing:
        return True
    if before.spread > RANDOM:
        return choice.spread <= BETTER * before.spread
    return choice.wait <= BETTER * before.wait
