"""Distributions of sizes before and after packing, and waste by cause, for `omnibal pack`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.large_arrays import in_pieces
from omnibal_ext.modalities.modality import FURTHER
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.summary import Summary
from omnibal_ext.packing.packs import TILES, TOKENS

LINE_BINS, BLOCKS = 24, " ▁▂▃▄▅▆▇█"


def distributions(index: PackedIndex, corpus: Corpus, summary: Summary) -> list[tuple[str, NDArray[Any]]]:
    """Return title and values of each histogram: samples before packing, packs of epoch 0 after it."""
    loads = np.asarray(index.loads[: summary.packs])
    further = [(one, one.units.capitalize()) for one in FURTHER if one in summary.further]
    return [
        ("Tiles of a sample", corpus.sizes.tiles),
        ("Tokens of a sample", corpus.sizes.tokens),
        *((f"{units} of a sample", corpus.sizes.more[one.size]) for one, units in further),
        (f"Tiles of a pack (budget {summary.vit_budget})", loads[:, TILES]),
        (f"Tokens of a pack (budget {summary.llm_budget})", loads[:, TOKENS]),
        *(
            (f"{units} of a pack (budget {summary.further[one].budget})", loads[:, index.load_names.index(one.size)])
            for one, units in further
        ),
        ("Samples of a pack", np.diff(index.pack_offsets[: summary.packs + 1])),
    ]


def waste_by_kind(summary: Summary) -> list[tuple[str, float]]:
    """Return (cause, fraction of work or budget that is wasted)."""
    tokens = sum(source["tokens"] for source in summary.sources)
    tiles = sum(source["tiles"] for source in summary.sources)
    unused, waiting = [], []
    for one, further in summary.further.items():
        used = sum(source[one.size] for source in summary.sources) / (summary.seats * further.budget)
        unused.append((f"{one.units} of the budget unused", 1 - used))
        waiting.append((f"ranks waiting: {one.name}", further.dist_ratio))
    return [
        ("padding inside packs", summary.pad_ratio),
        ("tiles of the budget unused", 1 - tiles / max(1, summary.seats * summary.vit_budget)),
        ("tokens of the budget unused", 1 - tokens / max(1, summary.seats * summary.llm_budget)),
        *unused,
        ("ranks waiting: ViT", summary.dist_ratio_vit),
        ("ranks waiting: LLM", summary.dist_ratio_llm),
        ("ranks waiting: attention", summary.dist_ratio_attention),
        *waiting,
    ]


def bar_line(values: NDArray[Any]) -> str:
    """Draw a histogram of integers, from minimum to maximum, as a line of block characters."""
    low, high = int(values.min()), int(values.max())
    heights = np.zeros(LINE_BINS, np.int64)
    for (piece,) in in_pieces(values):
        bins = (piece.astype(np.int64) - low) * LINE_BINS // (high - low + 1)
        heights += np.bincount(bins, minlength=LINE_BINS)
    return "".join(BLOCKS[-(-int(height) * (len(BLOCKS) - 1) // int(heights.max()))] for height in heights)
