"""The report as one HTML file: everything is drawn here, nothing is loaded from elsewhere."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from omnibal_ext.chain import layer_names
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.plan import layer_ranges
from omnibal_ext.report import draw
from omnibal_ext.report.against_random import (
    StepLoads,
    contributions,
    loads_of,
    random_index,
    sizes_of,
)
from omnibal_ext.report.breakdown import (
    CAUSES,
    FILL,
    LATE,
    UNEVEN,
    Change,
    Limit,
    breakdown,
    changes,
    faster_data,
    limit_of,
)
from omnibal_ext.report.heading import heading
from omnibal_ext.report.packing import PackingView
from omnibal_ext.report.subject import Subject
from omnibal_ext.report.timeline import EXCHANGE, Timeline

TEMPLATES = Environment(
    loader=PackageLoader("omnibal_ext.report", "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
BECAUSE = {
    "needed": "forwards and backwards of the layers, once",
    "recomputation": "layers are run again to save memory",
    "executor": "actions take time outside the layers: packs are small for this model",
    EXCHANGE: "ranks that run a pack together send each other parts of it",
    LATE: "ranks wait for packs that are read late, or for their own host",
    UNEVEN: "stages are not equally long",
    FILL: "the pipeline fills and drains, with few microbatches for its ranks",
    "update": "gradients are reduced and weights updated",
    "other replicas": "data-parallel ranks wait for the slowest of them",
}


@dataclass(frozen=True)
class SubjectView:
    """All that the template shows of a plan or run."""

    subject: Subject
    scale: float
    """Seconds of the time axis, shared by the subject's timelines."""
    against: tuple[StepLoads, StepLoads] | None
    contributions: Mapping[str, float]
    packing: PackingView | None

    @classmethod
    def of(cls, subject: Subject) -> "SubjectView":
        """From a plan or run; compared with random batches if the sizes of its samples are known."""
        index, scale = subject.index, max(timeline.seconds for timeline in subject.timelines) * 1.001
        sizes = sizes_of(index) if index else None
        if index is None or sizes is None:
            return cls(subject, scale, None, {}, PackingView(index, None) if index else None)
        packing = PackingView(index, sizes)
        if index.pad:
            return cls(subject, scale, None, {}, packing)
        replicas = index.global_batch // subject.plan.num_microbatches
        with tempfile.TemporaryDirectory() as folder:
            random = random_index(index, sizes, Path(folder) / "random")
            costs = PackCosts.of_profile(subject.profile)
            against = loads_of(index, costs, replicas), loads_of(random, costs, replicas)
            brought = contributions(subject.problem, subject.layout, index, random)
        return cls(subject, scale, against, brought, packing)

    @property
    def limit(self) -> Limit:
        """The rank that limits the pipeline."""
        return limit_of(self.subject.seen)

    @property
    def verdict(self) -> str:
        """The first sentences of the report."""
        limit, plan = self.limit, self.subject.plan
        names = layer_names(plan.chain)
        layers = ", ".join(layer_ranges(names, range(*plan.stages[stage].layers)) for stage in limit.stages)
        shares = breakdown(self.subject.seen)
        said, iteration = [], self.subject.seen.seconds * 1e3
        if limit.cause == LATE:
            late = shares[LATE] * iteration
            lost = f"Of {iteration:,.0f} ms per iteration, {late:,.0f} ms are waits for data or host"
            said.append(f"{lost}: more --num-workers, or smaller images, would help.")
        said.append(f"Of all ranks' time {shares['needed']:.0%} is needed work ({self.how}).")
        if plan.pipeline_model_parallel_size > 1:
            more = f", {limit.more:+.0%} against the others" if limit.others else ""
            said.append(f"Rank {limit.lane.rank} ({layers}) limits the pipeline: it works longest{more}.")
        if limit.share > 0 and limit.cause != LATE:
            said.append(f"Most is lost to {limit.cause}, {limit.share:.0%}: {BECAUSE[limit.cause]}.")
        return " ".join(said)

    @property
    def is_wide(self) -> bool:
        """Whether a timeline has packs of several ranks."""
        spans = (span for timeline in self.subject.timelines for lane in timeline.lanes for span in lane.spans)
        return any(span.width > 1 for span in spans)

    @property
    def how(self) -> str:
        """Whether the verdict's figures are measured or predicted."""
        if self.subject.measured:
            return "measured"
        return "predicted" if self.subject.index else "predicted for packs that fill both budgets; --packs names others"

    @property
    def heading(self) -> list[tuple[str, str]]:
        """(what, value) of the plan or run."""
        return heading(self.subject)

    @property
    def changes(self) -> list[Change]:
        """Suggested changes."""
        found = changes(self.subject.problem, self.subject.layout)
        return [*filter(None, [faster_data(self.subject.seen)]), *found]

    @property
    def timelines(self) -> list[tuple[Timeline, Markup]]:
        """Timelines, each with its drawing."""
        return [(timeline, draw.timeline_svg(timeline, self.scale)) for timeline in self.subject.timelines]

    @property
    def causes(self) -> Markup:
        """Bars of time by cause."""
        rows = []
        for timeline in self.subject.timelines:
            shares = breakdown(timeline)
            rows.append((timeline.name, [(_css(cause), 100 * max(0.0, shares[cause])) for cause in CAUSES]))
        return draw.bars("Share of all ranks' time", rows, "%")

    @property
    def chain(self) -> Markup:
        """The chain, cut into stages."""
        plan, profile = self.subject.plan, self.subject.profile
        costs = [profile.layers[kind] for kind in profile.cost_kinds]
        weights = [cost.forward_seconds + cost.backward_seconds for cost in costs]
        recomputed = {
            "recomputed": {layer for stage in plan.stages for layer in stage.recompute},
            "norms and activation recomputed": {layer for stage in plan.stages for layer in stage.recompute_cheap},
        }
        if plan.tower:
            recomputed["recomputed"] |= set(range(plan.tower.links) if plan.tower.again else plan.tower.recompute)
        edges = self.subject.layout.moved(self.subject.problem.links_beside).edges
        return draw.chain_svg(layer_names(plan.chain), edges, recomputed, weights)

    @property
    def memory(self) -> Markup:
        """Most bytes of every rank: predicted at full budgets, and recorded."""
        problem, layout = self.subject.problem, self.subject.layout
        peaks = problem.stage_peak_bytes(layout)
        rows: list[tuple[str, list[tuple[str, float]]]] = []
        for rank, peak in enumerate(peaks):
            rows.append((f"rank {rank}, predicted at full budgets", [("data", peak / 2**20)]))
            seen = [
                held for name, curve in self.subject.held_bytes().items() if name == f"rank {rank}" for _, held in curve
            ]
            if seen:
                rows.append((f"rank {rank}, recorded", [("measured", max(seen))]))
        limit = self.subject.plan.memory_gib
        return draw.bars("Most bytes a rank holds", rows, "MiB", limit * 1024 if limit else 0.0)

    @property
    def over_time(self) -> list[Markup]:
        """Seconds and bytes of the ranks, loss and speed, over iterations."""
        seconds, held, read = self.subject.stage_seconds(), self.subject.held_bytes(), self.subject.read_seconds()
        drawn = [draw.lines("Work of a rank, a microbatch", seconds, "ms", "iteration")]
        drawn.append(draw.lines("Wait of a rank for packs, an iteration", read, "ms", "iteration"))
        drawn.append(draw.lines("Most bytes a rank held", held, "MiB", "iteration"))
        for name, curves in self.subject.curves().items():
            drawn.append(draw.lines(name.replace("_", " "), curves, "", "iteration"))
        return [figure for figure in drawn if figure]

    @property
    def loads(self) -> list[Markup]:
        """Most and least loaded worker over the iterations, balanced and random, on one scale."""
        if self.against is None:
            return []
        found, most = [], 1e3 * max(float(loads.seconds.max()) for loads in self.against)
        for name, loads in zip(("balanced", "random"), self.against, strict=True):
            curves = {
                f"fullest {loads.workers}": [(float(n), 1e3 * s) for n, s in enumerate(loads.seconds.max(axis=1))],
                f"emptiest {loads.workers}": [(float(n), 1e3 * s) for n, s in enumerate(loads.seconds.min(axis=1))],
            }
            title = f"{name}: load over the iterations; {loads.spread:.1%} below the fullest"
            found.append(draw.lines(title, curves, "ms", "iteration", most))
        return found

    @property
    def brought(self) -> Markup:
        """Predicted samples a second as kinds of balance are added."""
        rows = [(name, [("data", speed)]) for name, speed in self.contributions.items()]
        return draw.bars("Predicted samples a second", rows, "samples/s") if rows else Markup("")

    @property
    def figures(self) -> list[tuple[str, str]]:
        """The main figures, at the top."""
        subject, now = self.subject, self.subject.seen
        rows = [("iteration, predicted", f"{subject.predicted.seconds * 1e3:,.1f} ms")]
        if subject.measured:
            off = subject.measured.seconds / subject.predicted.seconds - 1
            rows.append(("iteration, measured", f"{subject.measured.seconds * 1e3:,.1f} ms ({off:+.0%})"))
        shares = breakdown(now)
        named = {
            "needed work": ("needed",),
            "recomputation": ("recomputation",),
            "waiting for other ranks": (UNEVEN, FILL),
            "waiting for data or host": (LATE,),
        }
        named["the rest"] = tuple(cause for cause in CAUSES if not any(cause in causes for causes in named.values()))
        rows += [(name, f"{sum(shares[cause] for cause in causes):.0%}") for name, causes in named.items()]
        if speed := subject.samples_per_second():
            rows.append(("samples/s, whole run", f"{speed:,.1f}"))
        return rows


def report(subjects: Sequence[Subject], packings: Sequence[PackingView] = ()) -> str:
    """The HTML page about plans and runs, next to each other where there are several, and about packed indexes."""
    views = [SubjectView.of(subject) for subject in subjects]
    causes = [(_css(cause), cause, BECAUSE[cause]) for cause in CAUSES]
    template = TEMPLATES.get_template("report.html")
    return template.render(causes=causes, faster=_faster(views), views=views, packings=packings)


def packing_report(packing: PackingView) -> str:
    """The HTML page about a packed index alone."""
    return report([], [packing])


def _faster(views: Sequence[SubjectView]) -> list[str]:
    """Speed of each run as a multiple of the slowest run's ("1.50x"); "-" for a plan."""
    speeds = [view.subject.samples_per_second() or 0.0 for view in views]
    slowest = min(filter(None, speeds), default=0.0)
    return [f"{speed / slowest:.2f}x" if speed else "-" for speed in speeds]


def _css(cause: str) -> str:
    """The CSS class of a cause."""
    return "cause-" + cause.replace(" ", "-")
