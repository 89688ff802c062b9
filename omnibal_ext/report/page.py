"""The report as one HTML file: everything is drawn here, nothing is loaded from elsewhere."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from omnibal_ext.chain import layer_names
from omnibal_ext.costs.corrected import EXCHANGE
from omnibal_ext.modalities.modality import ALWAYS, MODALITIES, in_words
from omnibal_ext.plan import Plan, layer_ranges
from omnibal_ext.plan_tower import choice_in_words
from omnibal_ext.report import draw
from omnibal_ext.report.against_random import contributions, random_index, sizes_of
from omnibal_ext.report.breakdown import (
    CAUSES,
    FILL,
    LATE,
    PADDING,
    REPLICAS,
    UNEVEN,
    Change,
    Limit,
    breakdown,
    changes,
    faster_data,
    level_ranks,
    limit_of,
)
from omnibal_ext.report.packing import PackingView
from omnibal_ext.report.subject import Subject
from omnibal_ext.report.timeline import Timeline


def heading(subject: Subject) -> list[tuple[str, str]]:
    """Return (what, value) pairs in words of what is known of a plan or run: model, ranks, packs, versions, speed."""
    plan, profile = subject.plan, subject.profile
    trained = plan.trained
    adapters = [f"adapters of rank {trained.lora_rank} on {' and '.join(trained.lora_targets)}"]
    parts = [*(f"{part} frozen" for part in trained.frozen), *(adapters if trained.lora_rank else [])]
    measured = "measured" if profile.measured_with else "counted, not measured"
    shape = f"{plan.num_microbatches} microbatches a rank, schedule {plan.schedule}"
    found = [
        ("model", ", ".join([plan.model, *parts])),
        ("profile", ", ".join(filter(None, [profile.device, profile.dtype, measured]))),
        ("ranks", _ranks(subject)),
        ("iteration", shape),
        ("vision tower", choice_in_words(tower, plan.tower) if (tower := plan.predicted.get("tower")) else ""),
        ("pack", f"at most {_budgets(plan)}"),
        ("run" if subject.metrics else "plan", subject.date),
        ("versions", subject.versions),
        ("model's own work", _speed(subject)),
    ]
    return [(what, value) for what, value in found if value]


def _budgets(plan: Plan) -> str:
    """Return the budgets in words, without those of 1 of frames and the like: they stand for packs without any."""
    most = {one: plan.budgets.get(one.size, 0) for one in MODALITIES}
    return in_words({one.size: budget for one, budget in most.items() if one in ALWAYS or budget > 1}, " and ")


def _ranks(subject: Subject) -> str:
    """Return parallel sizes; the data-parallel size only if packs or a recorded iteration have it."""
    plan = subject.plan
    sizes = {
        "tensor": plan.tensor_model_parallel_size,
        "pipeline": plan.pipeline_model_parallel_size,
        "virtual pipeline": plan.virtual_pipeline_model_parallel_size,
        "expert": plan.expert_model_parallel_size,
    }
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name in ("tensor", "pipeline")]
    if subject.measured:
        words.append(f"data {len({lane.data_parallel_rank for lane in subject.measured.lanes})}")
    elif subject.index:
        words.append(f"data {subject.index.global_batch // plan.num_microbatches}")
    return ", ".join(words)


def _speed(subject: Subject) -> str:
    """Return the run's TFLOP/s and MFU in words; "" if its metrics have none."""
    lines = subject.intervals
    found = {
        name: subject.a_second([line[name] * line["seconds"] for line in lines])
        for name in ("model_tflops", "mfu")
        if lines and all(name in line for line in lines)
    }
    share = f", MFU {found['mfu']:.1%}" if "mfu" in found else ""
    return f"{found['model_tflops']:,.4g} TFLOP/s a device{share}" if found else ""


TEMPLATES = Environment(
    loader=PackageLoader("omnibal_ext.report", "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
BECAUSE = {
    "needed": "forwards and backwards of the layers, once",
    PADDING: "batches are filled up to their longest sample",
    "recomputation": "layers are run again to save memory",
    "executor": "actions take time outside the layers: packs are small for this model",
    EXCHANGE: "ranks that run a pack together send each other parts of it",
    LATE: "ranks wait for packs that are read late, or for their own host",
    UNEVEN: "stages are not equally long",
    FILL: "the pipeline fills and drains, with few microbatches for its ranks",
    "update": "gradients are reduced and weights updated",
    REPLICAS: "data-parallel ranks wait for the slowest of them",
}


SPARE = 1.001
"""Length of a time axis, in iterations."""


@dataclass(frozen=True)
class SubjectView:
    """All that the template shows of a plan or run."""

    subject: Subject
    scale: float
    """Seconds of the time axis, shared by the subject's timelines unless they are of two devices."""
    contributions: Mapping[str, float]
    packing: PackingView | None

    @classmethod
    def of(cls, subject: Subject) -> "SubjectView":
        """Make a view of a plan or run, compared with random batches if the sizes of its samples are known."""
        index, scale = subject.index, max(line.seconds for line in subject.timelines) * SPARE
        sizes = sizes_of(index) if index else None
        packing = PackingView(index, sizes) if index else None
        if index is None or sizes is None or index.pad:
            return cls(subject, scale, {}, packing)
        with tempfile.TemporaryDirectory() as folder:
            random = random_index(index, sizes, Path(folder) / "random")
            brought = contributions(subject.problem, subject.layout, index, random)
        return cls(subject, scale, brought, packing)

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
    def changes(self) -> list[Change]:
        """Suggested changes with their predicted gains."""
        found = changes(self.subject.problem, self.subject.layout)
        return [*filter(None, [faster_data(self.subject.seen), level_ranks(self.subject.seen)]), *found]

    @property
    def timelines(self) -> list[tuple[Timeline, Markup]]:
        """Timelines, each with its drawing."""
        shared = self.scale if self.subject.is_of_profile else 0.0
        return [(line, draw.timeline_svg(line, shared or line.seconds * SPARE)) for line in self.subject.timelines]

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
            recomputed["recomputed"] |= set(plan.tower.recompute)
        edges = self.subject.layout.moved(self.subject.problem.layers_beside).edges
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
    def brought(self) -> Markup:
        """Predicted samples a second as kinds of balance are added."""
        rows = [(name, [("data", speed)]) for name, speed in self.contributions.items()]
        return draw.bars("Predicted samples a second", rows, "samples/s") if rows else Markup("")

    @property
    def figures(self) -> list[tuple[str, str]]:
        """The main figures, at the top."""
        subject, now = self.subject, self.subject.seen
        where = "" if subject.is_of_profile else f" on {subject.profile.device}"
        rows = [("iteration, predicted" + where, f"{subject.predicted.seconds * 1e3:,.1f} ms")]
        if subject.measured:
            off = "" if where else f" ({subject.measured.seconds / subject.predicted.seconds - 1:+.0%})"
            rows.append(("iteration, measured", f"{subject.measured.seconds * 1e3:,.1f} ms{off}"))
        shares = breakdown(now)
        named = {
            "needed work": ("needed",),
            "padding": (PADDING,),
            "recomputation": ("recomputation",),
            "waiting for other ranks": (UNEVEN, FILL, REPLICAS),
            "waiting for data or host": (LATE,),
        }
        named["the rest"] = tuple(cause for cause in CAUSES if not any(cause in causes for causes in named.values()))
        rows += [(name, f"{sum(shares[cause] for cause in causes):.0%}") for name, causes in named.items()]
        if speed := subject.samples_per_second():
            rows.append(("samples/s, median", f"{speed:,.1f}"))
        return rows


def report(subjects: Sequence[Subject], packings: Sequence[PackingView] = ()) -> str:
    """Return the HTML page about plans and runs (or none), next to each other, and about packed indexes."""
    views = [SubjectView.of(subject) for subject in subjects]
    causes = [(_css(cause), cause, BECAUSE[cause]) for cause in CAUSES]
    template = TEMPLATES.get_template("report.html")
    return template.render(causes=causes, faster=_faster(views), heading=heading, views=views, packings=packings)


def comparison_page(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    times: Sequence[tuple[str, float]],
    said: Sequence[str],
    commands: Sequence[str],
) -> str:
    """Return the HTML page about ways to batch samples.

    Args:
        columns: and `rows`, of the table, as printed.
        times: (way, time as a multiple of balanced packs'), drawn as bars.
        said: sentences.
        commands: to type next.
    """
    bars = draw.bars("Time for the same samples, balanced packs = 1", [(name, [("data", n)]) for name, n in times], "x")
    return TEMPLATES.get_template("comparison.html").render(
        title=title, columns=columns, rows=rows, bars=bars, said=said, commands=commands
    )


def _faster(views: Sequence[SubjectView]) -> list[str]:
    """Return the speed of each run as a multiple of the slowest run's ("1.50x"); "-" for a plan."""
    speeds = [view.subject.samples_per_second() or 0.0 for view in views]
    slowest = min(filter(None, speeds), default=0.0)
    return [f"{speed / slowest:.2f}x" if speed else "-" for speed in speeds]


def _css(cause: str) -> str:
    """Return the CSS class of a cause."""
    return "cause-" + cause.replace(" ", "-")
