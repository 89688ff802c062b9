"""Where a pack's seconds go, by torch.profiler: a part of `benchmarks/gpu.py`.

A few iterations of the trainer are traced. A kernel belongs to the kind of layer and pass, "vit backward", whose mark
the host passed last before it asked for the kernel; hooks set the marks. Beside its milliseconds stands the least that
the same work takes: operations and bytes counted on the device of shapes (`tests/shapes/launches.py`), by what the card
reaches. Without a GPU the operators of the CPU take the place of kernels.
"""

import os
import subprocess
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, record_function, schedule, supported_activities

from benchmarks.gpu_packs import Packs
from benchmarks.gpu_training import WARM_UP, RandomTrainer, run_trainer
from megatron.vlm import platform
from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import DEVICES
from omnibal_ext.costs.operations import device_key
from omnibal_ext.costs.works import layer_works
from tests.programs import result_of

ROOT = Path(__file__).resolve().parents[1]
ITERATIONS = 3
"""That are traced, behind those in which functions are compiled."""
MOST_GROUPS, MOST_KERNELS = 17, 6
"""Rows of the table: the largest groups and kernels; with those of the other groups, of what no kernel takes, and of
attention two ways, 30."""
WIDEST = 60
"""Letters of a kernel's name that are shown."""
STEP_BYTES = 40
"""That an optimizer's step moves of a weight, as analytic profiles count (`omnibal_ext/costs/analytic.py`)."""
COUNTING = "import runpy; runpy.run_path('tests/shapes/launches.py', run_name='__main__')"
"""A process that has imported nothing of Megatron's, as the device of shapes needs it."""
PEAK = 0.8
"""Share of a card's published operations a second that the largest products reach, where that was not measured."""
MARK = "mark: "
STEP, PACK = "step", "pack"
"""What is in no layer: between iterations, and what is made once a pack."""
WORKS = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "product": ("gemm", "gemv", "nvjet", "cutlass", "xmma", "splitk", "::mm", "::addmm", "::bmm", "convolution"),
    "message": ("nccl",),
    "copy": ("memcpy", "memset", "::copy_"),
}
"""Parts of a kernel's name by kind of work, the first that fits; else it is elementwise."""
PLANS = "scaled_dot_product_cudnn_attention"
"""Part of the names of the operators that build cuDNN's plans, one for each shape that a process meets."""
ATTENTION = "scaled_dot_product_attention"
SLOW = 5e-3
"""Seconds of the host from which on such an operator has built one; else it takes some 50 us."""
Group = tuple[str, str]
"""Kind of layer and pass, kind of work."""
Counted = dict[Group, list[float]]
"""[kernels, operations, bytes]."""


@dataclass(frozen=True)
class Kernel:
    """One that ran."""

    asked: float
    """Moment of the host."""
    name: str
    seconds: float

    @property
    def work(self) -> str:
        """Its kind."""
        name = self.name.lower()
        return next((work for work, parts in WORKS.items() if any(part in name for part in parts)), "elementwise")


@dataclass(frozen=True)
class Trace:
    """Of some packs."""

    marks: list[tuple[float, str]]
    """Moments of the host from which on it asked for "vit forward" and the like, in order."""
    kernels: list[Kernel]
    packs: int
    seconds: float
    """Of the iterations."""
    idle: float
    """Of these, seconds in which the device did nothing."""
    shapes: int
    """Different ones that attention was asked for by `scaled_dot_product_attention`."""
    plans: list[float]
    """Host seconds of each call that built a plan of cuDNN's."""

    def named(self) -> Iterator[tuple[str, Kernel]]:
        """Each kernel, with what it belongs to."""
        moments = [moment for moment, _ in self.marks]
        for kernel in self.kernels:
            place = bisect_right(moments, kernel.asked)
            yield (self.marks[place - 1][1] if place else STEP), kernel


class TracedTrainer(RandomTrainer):
    """The trainer on made-up packs, of which iterations are traced."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        when = schedule(wait=WARM_UP - 1, warmup=1, active=ITERATIONS, repeat=1)
        self.profile = profile(activities=supported_activities(), schedule=when, record_shapes=True)
        self.moments: list[tuple[float, float]] = []
        """Of each iteration's start: before the profiler was told, and after."""

    def model(self, *arguments: Any, **named: Any) -> Any:
        """With hooks that set marks."""
        stage = super().model(*arguments, **named)
        stage.register_forward_pre_hook(partial(_set_mark, PACK))
        for link, module in stage.run_links:
            kind = stage.chain.kinds[link]
            module.register_forward_pre_hook(partial(_set_mark, f"{kind} forward"))
            module.register_forward_hook(partial(_mark_backward, f"{kind} backward"))
        return stage

    def forward_backward(self, **arguments: Any) -> list[Any]:
        """What is traced ends where the next iteration begins, so the optimizer's step is in it."""
        before = platform.now()
        (self.profile.step if self.moments else self.profile.start)()
        self.moments.append((before, platform.now()))
        found = super().forward_backward(**arguments)
        _set_mark(STEP)
        return found


def _set_mark(name: str, *_: Any) -> None:
    with record_function(MARK + name):
        pass


def _mark_backward(name: str, _: Any, __: Any, output: Any) -> None:
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(partial(_set_mark, name))


def traced(model: str, packs: Packs, an_iteration: int, folder: Path) -> tuple[Trace, Any]:
    """Train under the profiler; what `ITERATIONS` iterations of so many packs did, and the profiler."""
    made: list[TracedTrainer] = []

    def make(*given: Any) -> TracedTrainer:
        made.append(TracedTrainer(*given))
        return made[0]

    run_trainer(model, packs, an_iteration, WARM_UP + ITERATIONS + 1, folder, "--timelines", "0", make=make)
    (trainer,) = made
    (_, began), (ended, _) = (trainer.moments[place] for place in (WARM_UP, WARM_UP + ITERATIONS))
    return trace_of(trainer.profile.events(), ITERATIONS * an_iteration, ended - began), trainer.profile


def trace_of(events: Sequence[Any], packs: int, seconds: float) -> Trace:
    """What the profiler's events say: kernels where there are some, else operators without those they call."""
    host = [event for event in events if event.device_type == DeviceType.CPU]
    names = {event.name for event in host if event.is_user_annotation}  # the device has spans of these names too
    asked = [event for event in host if not event.name.startswith(MARK)]
    kernels = [
        Kernel(event.time_range.start, one.name, one.duration / 1e6)
        for event in asked for one in event.kernels if one.name not in names
    ]  # fmt: skip
    spans = [event for event in events if event.device_type != DeviceType.CPU and event.name not in names]
    operators = [event for event in asked if event.name not in names]
    if not kernels:
        kernels = [Kernel(event.time_range.start, event.name, event.self_cpu_time_total / 1e6) for event in operators]
    busy = _union(spans) if spans else sum(kernel.seconds for kernel in kernels)
    return Trace(
        marks=sorted((e.time_range.start, e.name.removeprefix(MARK)) for e in host if e.name.startswith(MARK)),
        kernels=kernels,
        packs=packs,
        seconds=seconds,
        idle=max(0.0, seconds - busy),
        shapes=len({str(event.input_shapes) for event in operators if event.name == f"aten::{ATTENTION}"}),
        plans=[taken for event in operators if PLANS in event.name and (taken := _seconds(event)) > SLOW],
    )


def _seconds(event: Any) -> float:
    return float(event.time_range.elapsed_us()) / 1e6


def _union(spans: Sequence[Any]) -> float:
    """Seconds in which any of them lasts."""
    end = total = 0.0
    for start, until in sorted((event.time_range.start, event.time_range.end) for event in spans):
        total += max(0.0, until - max(start, end))
        end = max(end, until)
    return total / 1e6


@dataclass(frozen=True)
class Reach:
    """What a card reaches."""

    products: float
    """Operations a second."""
    bytes: float
    """A second."""
    attention: Mapping[str, float]
    """Operations a second, by kind of layer."""

    @classmethod
    def of(cls, device: str, kernel: str, native: bool, peak: float | None = None) -> "Reach | None":
        """Of a card by its driver's name, whose packs `kernel` attends over; `peak`: of products, where measured."""
        key = device_key(device)
        if key is None:
            return None
        card = DEVICES[key]
        rates = {name: card.flops * card.attending(name).attention_efficiency for name in (kernel, "cudnn")}
        attention = {"llm": rates[kernel], "vit": rates[kernel if native else "cudnn"]}
        return cls(peak or card.flops * PEAK, card.memory_bandwidth * card.bandwidth_efficiency, attention)

    def least(self, group: Group, operations: float, moved: float) -> float:
        """Seconds that such work takes at least."""
        kind = group[0].partition(" ")[0]
        rate = self.attention.get(kind, self.products) if group[1] == "attention" else self.products
        return max(operations / rate, moved / self.bytes)


def counted(model: str, packs: Path, count: int, seconds: float) -> Counted:
    """What an iteration of the first `count` packs of a file asks for, by group; {} where it cannot be counted here."""
    kind = platform.megatron_defaults().get("transformer_impl", "engine")
    command = [sys.executable, "-W", "ignore", "-c", COUNTING, kind, model, str(packs), str(count)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=seconds
    )
    if done.returncode:
        print(f"launches could not be counted: {done.stderr[-1000:]}")
        return {}
    found = result_of(done.stdout)
    asked = {(name, work): figures for name, works in found.items() for work, figures in works.items()}
    architecture = preset(model)
    layers = layer_works(architecture, {}, 1)
    step = STEP_BYTES * sum(layers[kind].parameters for kind in architecture.cost_kinds)
    return {**asked, (STEP, "elementwise"): [0.0, 0.0, float(step)]}


Row = dict[str, Any]
"""What, how, launches and milliseconds a pack; launches counted and least milliseconds where known."""


def rows(trace: Trace, asked: Counted, counted_packs: int, reach: Reach | None) -> list[Row]:
    """Largest groups of kernels, then the others; the largest kernels within; and the device's idle time.

    The milliseconds of the groups and of the others add up to those of all kernels.
    """
    groups, kernels = dict[Group, float](), dict[Group, float]()
    launches: Counter[Group] = Counter()
    for name, kernel in trace.named():
        for sums, group in ((groups, (name, kernel.work)), (kernels, (name, kernel.name))):
            sums[group] = sums.get(group, 0.0) + kernel.seconds
        launches[name, kernel.work] += 1
    found = []
    for group, seconds in _largest(groups):
        row = _row(*group, seconds, trace.packs, launches[group])
        if reach is not None and group in asked:
            number, operations, moved = asked[group]
            least = reach.least(group, operations, moved)
            row |= {"launches counted": number / counted_packs} if number else {}
            row["least ms"] = least / counted_packs * 1e3
        found.append(row)
    largest, others = found[:MOST_GROUPS], found[MOST_GROUPS:]
    if others:
        rest = {name: sum(row.get(name, 0.0) for row in others) for name in ("launches", "ms", "least ms")}
        largest.append({"what": "others", "how": "", **rest})
    within = [_row(*group, seconds, trace.packs) for group, seconds in _largest(kernels)[:MOST_KERNELS]]
    idle = _row("device", "idle", trace.idle, trace.packs)
    plans = _row("plans of cuDNN's", _plans(trace), sum(trace.plans), trace.packs, len(trace.plans))
    return [*largest, *({**row, "within": True} for row in within), idle, plans]


def _largest(sums: Mapping[Group, float]) -> list[tuple[Group, float]]:
    return sorted(sums.items(), key=lambda pair: -pair[1])


def _plans(trace: Trace) -> str:
    return f"{len(trace.plans) / ITERATIONS:.3g} built an iteration, for {trace.shapes} shapes"


def _row(what: str, how: str, seconds: float, packs: int, launches: int | None = None) -> Row:
    number: Row = {} if launches is None else {"launches": launches / packs}
    return {"what": what, "how": how[:WIDEST], **number, "ms": seconds / packs * 1e3}


def of_ways(found: Mapping[str, Mapping[str, float]]) -> list[Row]:
    """Rows of attention two ways (`benchmarks.gpu_ways`), of one layer."""
    return [
        {"what": name, "how": f"the first of another size {row['first ms']:.1f} ms", "ms": row["ms"], "within": True}
        for name, row in found.items()
    ]


def shown(found: Sequence[Row]) -> list[tuple[str, ...]]:
    """Rows as a table has them."""
    columns = {"launches": ".0f", "launches counted": ".0f", "ms": ".3f", "least ms": ".3f"}
    table = []
    for row in found:
        cells = [format(row[name], how) if name in row else "-" for name, how in columns.items()]
        beyond = f"{row['ms'] - row['least ms']:.3f}" if "least ms" in row else "-"
        table.append((row["what"], row["how"], *cells, beyond))
    return table


def not_explained(found: Sequence[Row]) -> dict[str, float]:
    """Milliseconds a pack beyond the least, by group; of what is not counted all. Largest first."""
    beyond = {
        f"{row['what']} {row['how']}".strip(): row["ms"] - row.get("least ms", 0.0)
        for row in found if "within" not in row and not row["what"].startswith("plans")
    }  # fmt: skip
    return dict(sorted(beyond.items(), key=lambda pair: -pair[1]))
