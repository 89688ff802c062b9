"""Draws data as SVG, with widths in percent: drawings scale with the page's width, text keeps its size.

Colours come from the page's style sheet, by class. Every function returns markup that needs no escaping.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from math import ceil, floor, log10

from markupsafe import Markup, escape

from omnibal_ext.plan import layer_ranges
from omnibal_ext.report.timeline import Lane, Span, Timeline, waits
from omnibal_ext.schedules.actions import OF_TOWER

ROW, GAP, AXIS = 34, 10, 26
"""Heights in pixels of a lane, of the gap between lanes, and of the axis below."""
TEAM = 5
"""Height in pixels of the mark on actions of packs that several ranks share."""
PLOT, MARGIN = 170, 24
LAST_LABEL = 0.8
"""Fraction of the axis after which labels are left of their mark, so that narrow screens do not cut them off."""
STAGE_WIDTH = 0.06
"""Least width of a stage, as a fraction of the drawing, for its number to fit on a phone."""
LABEL_WIDTH = 0.9
"""Least width of an action, in percent of the drawing, for its number to be shown without zooming in."""


def timeline_svg(timeline: Timeline, seconds: float) -> Markup:
    """Draw the lanes of one iteration under each other, on an axis of `seconds`."""
    rows = [_lane(lane, number, seconds) for number, lane in enumerate(timeline.lanes)]
    arrows = [_arrow(timeline, *transfer, seconds) for transfer in timeline.transfers()]
    height = len(timeline.lanes) * (ROW + GAP) + AXIS
    axis = _time_axis(seconds, height - AXIS)
    return _svg(f"{timeline.name}: what every rank does, over time", height, [axis, *rows, *arrows], "timeline")


def _lane(lane: Lane, number: int, seconds: float) -> Markup:
    top = number * (ROW + GAP) + GAP // 2
    drawn = [_rect("wait", start, end - start, seconds, top, ROW, "waits") for start, end in waits(lane)]
    drawn += [_rect("read", start, end - start, seconds, top, ROW, "waits for a pack") for start, end in lane.reads]
    for span in lane.spans:
        drawn.append(_span(span, lane, seconds, top))
    if (update := lane.end - lane.update_at) > 0:
        drawn.append(_rect("step", lane.update_at, update, seconds, top, ROW, "gradients and weights"))
    return Markup("<g>{}</g>").format(Markup("").join(drawn))


def _span(span: Span, lane: Lane, seconds: float, top: int) -> Markup:
    """Draw an action: a group, which the keyboard can focus, of a box for each part."""
    boxes, at = [], span.start
    for piece in span.pieces:
        boxes.append(_rect(f"{piece.part} {piece.phase}", at, piece.seconds, seconds, top, ROW))
        at += piece.seconds
    if span.width > 1:
        boxes.append(_rect("team", span.start, span.end - span.start, seconds, top, TEAM))
    made_of = ", ".join(f"{p.part} {p.phase} {p.seconds * 1e3:.2f} ms" for p in span.pieces)
    where = "tower" if span.action.kind in OF_TOWER else f"stage {span.stage}"
    words = (
        f"rank {lane.rank}: {span.action.kind}{span.action.microbatch}, {where}, "
        f"{span.start * 1e3:.2f} to {span.end * 1e3:.2f} ms; {made_of}"
    ) + f"; a pack of {span.width} ranks" * (span.width > 1)
    width = 100 * (span.end - span.start) / seconds
    label = Markup("<text x='{:.4f}%' y='{}' class='{}' data-width='{:.4f}'>{}</text>").format(
        100 * span.start / seconds + width / 2, top + ROW // 2 + 4, "box" if width > LABEL_WIDTH else "box narrow",
        width, span.action.microbatch,
    )  # fmt: skip
    template = "<g class='span' tabindex='-1' role='img' aria-label='{}'><title>{}</title>{}{}</g>"
    return Markup(template).format(words, words, Markup("").join(boxes), label)


def _arrow(timeline: Timeline, made: Span, source: Lane, taken: Span, target: Lane, seconds: float) -> Markup:
    rows = [timeline.lanes.index(lane) for lane in (source, target)]
    down = rows[1] > rows[0]
    ends = [row * (ROW + GAP) + GAP // 2 + (ROW if down == (n == 0) else 0) for n, row in enumerate(rows)]
    return Markup("<line class='transfer' x1='{:.4f}%' x2='{:.4f}%' y1='{}' y2='{}'/>").format(
        100 * made.end / seconds, 100 * taken.start / seconds, *ends
    )


def _rect(kind: str, start: float, length: float, seconds: float, top: float, height: float, title: str = "") -> Markup:
    words = Markup("<title>{} {:.2f} ms</title>").format(title, length * 1e3) if title else Markup("")
    return Markup("<rect class='{}' x='{:.4f}%' width='{:.4f}%' y='{}' height='{}'>{}</rect>").format(
        kind, 100 * start / seconds, 100 * length / seconds, top, height, words
    )


def _time_axis(seconds: float, top: int) -> Markup:
    marks = [
        Markup("<line class='grid' x1='{0:.4f}%' x2='{0:.4f}%' y1='0' y2='{1}'/>"
               "<text class='tick{4}' x='{0:.4f}%' y='{2}'>{3}</text>").format(
            100 * at / seconds, top, top + 16, _short(at * 1e3) + " ms",
            " minor" * (number % 2) + " end" * (at > LAST_LABEL * seconds),
        )
        for number, at in enumerate(ticks(seconds)[:-1])
    ]  # fmt: skip
    return Markup("").join(marks)


def ticks(most: float, count: int = 8) -> list[float]:
    """Return round values from 0 to at least `most`, about `count` of them."""
    if most <= 0:
        return [0.0, 1.0]
    rough = most / count
    unit = 10 ** floor(log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    return [step * n for n in range(ceil(most / step * 0.999) + 1)]


def bars(title: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]], unit: str, limit: float = 0.0) -> Markup:
    """Draw stacked horizontal bars (label, [(CSS class, value), ...]); a line at `limit`, 0: none."""
    most = ticks(max([limit, *(sum(value for _, value in parts) for _, parts in rows)]))[-1]
    drawn = []
    for number, (label, parts) in enumerate(rows):
        top, at = number * 30 + 4, 0.0
        for kind, value in parts:
            box = "<rect class='{}' x='{:.4f}%' width='{:.4f}%' y='{}' height='20'><title>{}: {} {} {}</title></rect>"
            drawn.append(
                Markup(box).format(kind, 100 * at / most, 100 * value / most, top, label, kind, _short(value), unit)
            )
            at += value
        words = label if unit == "%" else f"{label}: {_short(at)} {unit}"
        drawn.append(Markup("<text class='bar' x='4' y='{}'>{}</text>").format(top + 14, words))
    if limit:
        line = "<line class='limit' x1='{0:.4f}%' x2='{0:.4f}%' y1='0' y2='{1}'/>"
        drawn.append(Markup(line).format(100 * limit / most, len(rows) * 30))
    return _figure(title, len(rows) * 30 + 4, drawn)


def lines(
    title: str, curves: Mapping[str, Sequence[tuple[float, float]]], unit: str, across: str, most: float = 0.0
) -> Markup:
    """Draw named curves of (x, y) on shared axes; y goes from 0 to the largest value, at least to `most`."""
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return Markup("")
    right, scale = max(x for x, _ in points) or 1.0, ticks(max(most, *(y for _, y in points)), 4)
    left = min(x for x, _ in points)
    span = (right - left) or 1.0
    drawn = [_level(value, scale[-1], unit) for value in scale]
    for number, (name, curve) in enumerate(curves.items()):
        ordered = sorted(curve)
        for (x1, y1), (x2, y2) in pairwise(ordered):
            drawn.append(
                Markup("<line class='curve curve-{}' x1='{:.3f}%' x2='{:.3f}%' y1='{:.1f}' y2='{:.1f}'>"
                       "<title>{}</title></line>").format(
                    number % 6, 100 * (x1 - left) / span, 100 * (x2 - left) / span,
                    _height(y1, scale[-1]), _height(y2, scale[-1]), name,
                )
            )  # fmt: skip
    foot = Markup("<text class='tick' x='0' y='{0}'>{1} {2}</text><text class='tick end' x='100%' y='{0}'>{3}</text>")
    drawn.append(foot.format(PLOT + 16, across, _short(left), _short(right)))
    keys = [Markup("<span><i class='key-{}'></i>{}</span>").format(n % 6, name) for n, name in enumerate(curves)]
    legend = Markup("<p class='legend'>{}</p>").format(Markup("").join(keys))
    return _figure(title, PLOT + AXIS, drawn, "plot curves", legend)


def histogram(title: str, values: Sequence[float], limit: float = 0.0, bins: int = 40) -> Markup:
    """Draw counts of values from 0, captioned with mean and percentiles; a line at `limit`, 0: none."""
    ordered = sorted(values)
    if not ordered:
        return Markup("")
    width = max(1, ceil((max(ordered[-1], limit) + 1) / bins))
    counts = [0] * (int(max(ordered[-1], limit)) // width + 1)
    for value in ordered:
        counts[int(value) // width] += 1
    scale = ticks(max(counts), 4)
    drawn = [_level(value, scale[-1], "") for value in scale]
    for number, count in enumerate(counts):
        last = number * width + width - 1
        top = _height(count, scale[-1])
        box = "<rect class='data' x='{:.3f}%' width='{:.3f}%' y='{:.1f}' height='{:.1f}'><title>{}: {:,}</title></rect>"
        label = f"{last}" if width == 1 else f"{number * width} to {last}"
        share = 100 / len(counts)
        drawn.append(Markup(box).format(number * share, share * 0.92, top, PLOT - top, label, count))
    reach = width * len(counts)
    if limit:
        line = "<line class='limit' x1='{0:.3f}%' x2='{0:.3f}%' y1='0' y2='{1}'><title>budget {2:,}</title></line>"
        drawn.append(Markup(line).format(100 * (limit + 0.5) / reach, PLOT, limit))
    p50, p90, p99 = (ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.5, 0.9, 0.99))
    foot = "<text class='tick' x='0' y='{0}'>0</text><text class='tick end' x='100%' y='{0}'>{1:,}</text>"
    drawn.append(Markup(foot).format(PLOT + 16, reach - 1))
    words = f"{title}. Mean {sum(ordered) / len(ordered):,.1f}, median {p50:,}, 90% {p90:,}, 99% {p99:,}"
    return _figure(f"{words}, most {ordered[-1]:,}", PLOT + AXIS, drawn, "plot curves")


def chain_svg(
    names: Sequence[str], edges: Sequence[int], recomputed: Mapping[str, Collection[int]], weights: Sequence[float]
) -> Markup:
    """Draw the layer chain as boxes of widths `weights` (seconds), cut at `edges` into stages, which are listed below.

    recomputed: {what is recomputed, in words: layer ids}; these are hatched.
    """
    total, at, drawn = sum(weights) or 1.0, 0.0, []
    for layer, (name, weight) in enumerate(zip(names, weights, strict=True)):
        part = name.split(".")[0]
        recompute = [what for what, layers in recomputed.items() if layer in layers]
        kind = f"{part} recomputed" if recompute else part
        width = 100 * weight / total
        words = ", ".join([f"{name}: {weight / total:.1%} of the work", *recompute])
        box = "<rect class='layer {}' x='{:.4f}%' width='{:.4f}%' y='22' height='34'><title>{}</title></rect>"
        drawn.append(Markup(box).format(kind, at, width, words))
        if layer in edges:
            stage = list(edges).index(layer)
            mark = "<line class='cut' x1='{0:.4f}%' x2='{0:.4f}%' y1='0' y2='62'/>"
            drawn.append(Markup(mark).format(at))
            if sum(weights[layer : edges[stage + 1]]) / total >= STAGE_WIDTH:
                text = "<text class='stage' x='{:.4f}%' dx='6' y='14'>{}</text>"
                drawn.append(Markup(text).format(at, stage))
        at += width
    stages = [Markup("<li>{}</li>").format(layer_ranges(names, range(*ends))) for ends in pairwise(edges)]
    listed = Markup("<ol class='stages' start='0'>{}</ol>").format(Markup("").join(stages))
    return _svg("the layers, where they are cut", 64, drawn, "chain") + listed


def _level(value: float, most: float, unit: str) -> Markup:
    y = _height(value, most)
    line = "<line class='grid' x1='0' x2='100%' y1='{0:.1f}' y2='{0:.1f}'/>"
    words = "<text class='tick level' x='-6' y='{1:.1f}'>{2}</text>"
    return Markup(line + words).format(y, y + 4, f"{_short(value)} {unit}".strip())


def _height(value: float, most: float) -> float:
    return PLOT - (PLOT - MARGIN) * value / most


def _short(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _figure(title: str, height: int, drawn: Iterable[Markup], kind: str = "plot", legend: str = "") -> Markup:
    figure = "<figure><figcaption>{}</figcaption>{}{}</figure>"
    return Markup(figure).format(title, legend, _svg(title, height, drawn, kind))


def _svg(title: str, height: int, drawn: Iterable[Markup], kind: str) -> Markup:
    template = "<svg class='{}' width='100%' height='{}' role='group' aria-label='{}'>{}</svg>"
    return Markup(template).format(kind, height, escape(title), Markup("").join(drawn))
