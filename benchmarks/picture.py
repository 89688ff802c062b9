"""Pictures for README.md, of `benchmarks/timeline.py` and `benchmarks/peer_waiting.py`; needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from omnibal_ext.report.timeline import Timeline

# Okabe and Ito's palette, for colour-blind readers too. The page's style sheet has the same.
COLOURS = {"vit": "#009e73", "projector": "#e69f00", "llm": "#0072b2", "head": "#56b4e9", "exchange": "#cc79a7",
           "other": "#999999"}  # fmt: skip
DARKER = 0.68
"""Brightness of a backward's colour, as in the style sheet."""
PALE = {"weight": 0.55, "recompute": 0.75}


def write_png(path: str | Path, timelines: Sequence[Timeline]) -> None:
    """Draw timelines under each other on one axis of milliseconds."""
    longest = max(timeline.seconds for timeline in timelines)
    figure = Figure(figsize=(12, 0.6 + sum(0.7 + 0.42 * len(timeline.lanes) for timeline in timelines)))
    heights = [len(timeline.lanes) + 1 for timeline in timelines]
    axes = figure.subplots(len(timelines), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, timeline in zip(axes, timelines, strict=True):
        for row, lane in enumerate(timeline.lanes):
            for span in lane.spans:
                at = span.start
                for piece in span.pieces:
                    hatch = "////" if piece.phase == "recompute" else None
                    shade = colour(piece.part, piece.phase)
                    axis.barh(row, piece.seconds * 1e3, left=at * 1e3, height=0.8, color=shade, hatch=hatch,
                              edgecolor="white", linewidth=0.3)  # fmt: skip
                    at += piece.seconds
            axis.barh(row, (lane.end - lane.update_at) * 1e3, left=lane.update_at * 1e3, height=0.8, color="#cccccc")
        names = [f"replica {lane.data_parallel_rank} rank {lane.rank}" for lane in timeline.lanes]
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        axis.set_xlim(0, longest * 1e3)
        axis.set_title(timeline.name, loc="left", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("ms")
    spans = (span for timeline in timelines for lane in timeline.lanes for span in lane.spans)
    drawn = {piece.part for span in spans for piece in span.pieces}
    patches = [Patch(color=colour(part, "forward"), label=part) for part in COLOURS if part in drawn]
    patches.append(Patch(color=colour("llm", "backward"), label="darker: backward"))
    pale = colour("llm", "recompute")
    patches.append(Patch(facecolor=pale, edgecolor="white", hatch="////", label="striped: recomputed"))
    axes[0].legend(handles=patches, ncols=len(patches), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    figure.tight_layout()
    figure.savefig(path, format="png", dpi=150)


def write_bars(path: str | Path, bars: Mapping[str, Mapping[str, float]], ours: str) -> None:
    """Draw shares as SVG: a panel for each corpus, a bar for each way, with its figure; `ours` in colour."""
    figure = Figure(figsize=(10, 0.7 + 0.27 * len(next(iter(bars.values())))))
    for axis, (corpus, shares) in zip(figure.subplots(1, len(bars), squeeze=False)[0], bars.items(), strict=True):
        colours = [COLOURS["llm"] if way == ours else COLOURS["other"] for way in shares]
        drawn = axis.barh(list(shares), list(shares.values()), color=colours)
        axis.bar_label(drawn, fmt="{:.1%}", padding=2)
        axis.set_xlim(0, 1.2 * max(max(one.values()) for one in bars.values()))
        axis.set_title(corpus, loc="left", fontsize=10)
        axis.invert_yaxis()
        axis.set_xticks([])
        axis.tick_params(left=False, labelleft=axis.get_subplotspec().is_first_col())
        axis.spines[:].set_visible(False)
    figure.tight_layout()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "omnibal"}):  # text as text; the same bytes
        figure.savefig(path, format="svg", metadata={"Date": None})


def colour(part: str, phase: str) -> tuple[float, float, float, float]:
    """Red, green, blue and opacity (0 to 1) of a part of an action."""
    value = COLOURS[part].lstrip("#")
    shade = DARKER if phase == "backward" else 1.0
    red, green, blue = (int(value[at : at + 2], 16) / 255 * shade for at in (0, 2, 4))
    return red, green, blue, PALE.get(phase, 1.0)
