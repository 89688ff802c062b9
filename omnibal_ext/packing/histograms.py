"""The report of a packing as one HTML page without scripts: histograms, waste by kind, counts by source and reason."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.index import PackedIndex
from omnibal_ext.packing.packs import TILES, TOKENS
from omnibal_ext.packing.summary import Summary

WIDTH, HEIGHT, MARGIN, BINS = 420, 180, 28, 40
LINE_BINS, BLOCKS = 32, " ▁▂▃▄▅▆▇█"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 920px; margin: 2em auto; color: #222; }
figure { display: inline-block; margin: 0 12px 12px 0; } figcaption { font-weight: 600; }
table { border-collapse: collapse; margin: 1em 0; } td, th { padding: 3px 12px; border-bottom: 1px solid #ddd; }
td + td, th + th { text-align: right; } rect { fill: #3a7ca5; } text { font-size: 11px; fill: #555; }
"""


def write_report(path: str | Path, index: PackedIndex, corpus: Corpus, summary: Summary) -> None:
    """Write what `tools/pack_data.py --report` shows about epoch 0 of an index."""
    figures = [histogram(title, values) for title, values in distributions(index, corpus, summary)]
    measures = [(name.replace("_", " "), value) for name, value in asdict(summary).items() if np.isscalar(value)]
    page = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Packing report</title>",
        f"<style>{STYLE}</style><h1>Packing report</h1>",
        f"<p>{summary.samples:,} samples in {summary.packs:,} packs, {summary.iterations:,} steps an epoch of "
        f"{summary.tokens_per_iteration:,.0f} tokens each, by method {escape(str(index.manifest['method']))}.</p>",
        "<h2>Sizes before and after</h2>",
        *figures,
        "<h2>Waste by kind</h2>",
        table(("kind", "share"), [(kind, f"{share:.2%}") for kind, share in waste_by_kind(summary)]),
        "<h2>Sources</h2>",
        table(tuple(summary.sources[0]), [tuple(source.values()) for source in summary.sources]),
        "<h2>Left out</h2>",
        table(("reason", "samples"), summary.rejected_by_reason.items() or [("nothing", 0)]),
        "<h2>All measures</h2>",
        table(("measure", "value"), measures),
    ]
    Path(path).write_text("\n".join(page) + "\n", encoding="utf-8")


def distributions(index: PackedIndex, corpus: Corpus, summary: Summary) -> list[tuple[str, NDArray[Any]]]:
    """Return what there is a histogram of: samples before, packs of epoch 0 after."""
    loads = np.asarray(index.loads[: summary.packs])
    return [
        ("Tiles of a sample", corpus.sizes.tiles),
        ("Tokens of a sample", corpus.sizes.tokens),
        (f"Tiles of a pack (budget {summary.vit_budget})", loads[:, TILES]),
        (f"Tokens of a pack (budget {summary.llm_budget})", loads[:, TOKENS]),
        ("Samples of a pack", np.diff(index.pack_offsets[: summary.packs + 1])),
    ]


def waste_by_kind(summary: Summary) -> list[tuple[str, float]]:
    """Return the share of work or room that is lost, for each way to lose it."""
    tokens = sum(source["tokens"] for source in summary.sources)
    tiles = sum(source["tiles"] for source in summary.sources)
    return [
        ("padding inside packs", summary.pad_ratio),
        ("tiles of the budget unused", 1 - tiles / max(1, summary.packs * summary.vit_budget)),
        ("tokens of the budget unused", 1 - tokens / max(1, summary.packs * summary.llm_budget)),
        ("ranks waiting: ViT", summary.dist_ratio_vit),
        ("ranks waiting: LLM", summary.dist_ratio_llm),
        ("ranks waiting: attention", summary.dist_ratio_attention),
    ]


def bar_line(values: NDArray[Any]) -> str:
    """Draw a distribution of whole numbers in one line of text, from the least to the greatest value."""
    low, high = int(values.min()), int(values.max())
    heights = np.bincount((values.astype(np.int64) - low) * LINE_BINS // (high - low + 1), minlength=LINE_BINS)
    return "".join(BLOCKS[-(-int(height) * (len(BLOCKS) - 1) // int(heights.max()))] for height in heights)


def histogram(title: str, values: NDArray[Any]) -> str:
    """Draw the distribution of whole numbers as SVG inside a figure."""
    low, high = int(values.min()), int(values.max())
    step = max(1, -(-(high - low + 1) // BINS))
    heights = np.bincount((values.astype(np.int64) - low) // step)
    width, tallest = (WIDTH - 2 * MARGIN) / len(heights), int(heights.max())
    bars = []
    for i, height in enumerate(heights.tolist()):
        size = (HEIGHT - 2 * MARGIN) * height / tallest
        first = low + i * step
        label = f"{first}" if step == 1 else f"{first} to {first + step - 1}"
        bars.append(
            f"<rect x='{MARGIN + i * width:.1f}' y='{HEIGHT - MARGIN - size:.1f}' width='{max(1.0, width - 1):.1f}' "
            f"height='{size:.1f}'><title>{label}: {height:,}</title></rect>"
        )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption><svg width='{WIDTH}' height='{HEIGHT}' role='img' "
        f"aria-label='{escape(title)}'>{''.join(bars)}<text x='{MARGIN}' y='{HEIGHT - 8}'>{low:,}</text>"
        f"<text x='{WIDTH - MARGIN}' y='{HEIGHT - 8}' text-anchor='end'>{high:,}</text>"
        f"<text x='{MARGIN}' y='14'>most {tallest:,}; mean {values.mean():,.1f}</text></svg></figure>"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Write a table; every cell is escaped."""
    head = "".join(f"<th>{escape(str(column).replace('_', ' '))}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(_text(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _text(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:,.4f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
