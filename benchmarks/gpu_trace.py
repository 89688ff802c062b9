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
from megatron.core.utils import get_model_config
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule, supported_activities

from benchmarks.gpu_packs import Packs
from benchmarks.gpu_training import WARM_UP, RandomTrainer, run_trainer
from benchmarks.gpu_ways import BATCH
from megatron.vlm import platform
from megatron.vlm.models.attention.core_attention import choose_kernel
from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import DEVICES, STEP_BYTES
from omnibal_ext.costs.operations import device_key
from omnibal_ext.costs.works import layer_works
from omnibal_ext.modalities.modality import LANGUAGE, VISION
from tests.programs import result_of

ROOT = Path(__file__).resolve().parents[1]
ITERATIONS = 3
"""Traced iterations. Before them run those that compile functions, one that is timed, and one in which the profiler
starts."""
MOST_GROUPS, MOST_KERNELS = 16, 6
"""Rows of the table for groups and for single kernels, the largest of each. With the rows for all other groups, for the
device, and for attention two ways the table has 30."""
WIDEST = 60
"""Most characters of a kernel's name that are shown."""
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
ATTENTION, BATCHES = "scaled_dot_product_attention", "cudnn"
"""Torch's attention over batches, and the kernel that it prefers on Hopper."""
Group = tuple[str, str]
"""Kind of layer and pass, kind of work."""
Counted = dict[Group, list[float]]
"""[kernels, operations, bytes]."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that ran on the device."""

    asked: float
    """When the host asked for it, in microseconds of the profiler's clock."""
    name: str
    seconds: float

    @property
    def work(self) -> str:
        """What kind of work it does: a key of `WORKS`, or "elementwise"."""
        name = self.name.lower()
        return next((work for work, parts in WORKS.items() if any(part in name for part in parts)), "elementwise")


@dataclass(frozen=True)
class Trace:
    """The kernels of the traced iterations, and the marks that say what each belongs to."""

    marks: list[tuple[float, str]]
    """(when the host began to ask for it, name such as "vit forward"), in order."""
    kernels: list[Kernel]
    packs: int
    """Packs of all traced iterations."""
    seconds: float
    """Seconds of all traced iterations."""
    idle: float
    """Seconds of `seconds` in which the device ran nothing."""
    loose: float
    """Seconds of kernels that the profiler links to no operator."""
    shapes: int
    """Different input shapes of `scaled_dot_product_attention`, each of which needs a plan of cuDNN's."""

    def named(self) -> Iterator[tuple[str, Kernel]]:
        """Yield each kernel with the name of the last mark before it."""
        moments = [moment for moment, _ in self.marks]
        for kernel in self.kernels:
            place = bisect_right(moments, kernel.asked)
            yield (self.marks[place - 1][1] if place else STEP), kernel


@dataclass(frozen=True)
class Traced:
    """A run under the profiler: its trace, and what the trace is read with."""

    trace: Trace
    untraced: float
    """Seconds of an iteration before the profiler started."""
    attention: dict[str, str]
    """The kernel that attends, by kind of layer."""
    profile: Any


class TracedTrainer(RandomTrainer):
    """A trainer on random packs, some of whose iterations are traced."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        when = schedule(wait=WARM_UP + 1, warmup=1, active=ITERATIONS, repeat=1)
        self.profile = profile(activities=supported_activities(), schedule=when, record_shapes=True)
        self.moments: list[tuple[float, float]] = []
        """For each iteration, seconds just before and just after the profiler was told that it starts."""

    def model(self, *arguments: Any, **named: Any) -> Any:
        """Return the stage with hooks that set marks."""
        stage = super().model(*arguments, **named)
        stage.register_forward_pre_hook(partial(_set_mark, PACK))
        for layer, module in stage.run_layers:
            kind = stage.chain.kinds[layer]
            module.register_forward_pre_hook(partial(_set_mark, f"{kind} forward"))
            module.register_forward_hook(partial(_mark_backward, f"{kind} backward"))
        return stage

    def forward_backward(self, **arguments: Any) -> list[Any]:
        """Tell the profiler that an iteration starts, which ends the one before with its optimizer step; run it."""
        before, (model, *_) = platform.now(), arguments["model"]
        if not self.moments:
            config = get_model_config(model)
            config.finalize_model_grads_func = partial(_finalize, config.finalize_model_grads_func)
        (self.profile.step if self.moments else self.profile.start)()
        self.moments.append((before, platform.now()))
        return super().forward_backward(**arguments)

    @property
    def attention(self) -> dict[str, str]:
        """The kernel that attends, by kind of layer; over tiles and samples in batches it is torch's choice."""
        chain = self.stage.chain
        over_images = chain.architecture.vision.native is not None
        found = {
            LANGUAGE.kinds[1]: choose_kernel(chain.language),
            VISION.kinds[1]: choose_kernel(chain.configs[VISION], True) if over_images else BATCHES,
        }
        return {kind: BATCHES if kernel == "sample_by_sample" else kernel for kind, kernel in found.items()}


def _set_mark(name: str, *_: Any) -> None:
    with record_function(MARK + name):
        pass


def _finalize(finalize: Any, *arguments: Any, **named: Any) -> None:
    """Mark that the layers' backward is over, then finalize the gradients."""
    _set_mark(STEP)
    finalize(*arguments, **named)


def _mark_backward(name: str, _: Any, __: Any, output: Any) -> None:
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.register_hook(partial(_set_mark, name))


def traced(model: str, packs: Packs, an_iteration: int, folder: Path) -> Traced:
    """Train under the profiler; return what `ITERATIONS` iterations of `an_iteration` packs did."""
    made: list[TracedTrainer] = []

    def make(*given: Any) -> TracedTrainer:
        made.append(TracedTrainer(*given))
        return made[0]

    first = WARM_UP + 2
    run_trainer(model, packs, an_iteration, first + ITERATIONS + 1, folder, "--timelines", "0", make=make)
    (trainer,) = made
    untraced, seconds = (
        trainer.moments[until][0] - trainer.moments[since][1]
        for since, until in ((WARM_UP, WARM_UP + 1), (first, first + ITERATIONS))
    )
    trace = trace_of(trainer.profile.events(), ITERATIONS * an_iteration, seconds)
    return Traced(trace, untraced, trainer.attention, trainer.profile)


def trace_of(events: Sequence[Any], packs: int, seconds: float) -> Trace:
    """Return the trace in the profiler's events: kernels of a GPU, else the CPU's operators, without those they call.

    Raises RuntimeError if there is a GPU and the profiler recorded no kernels.
    """
    host = [event for event in events if event.device_type == DeviceType.CPU]
    names = {event.name for event in host if event.is_user_annotation}  # the device has spans of these names too
    asked = [event for event in host if not event.name.startswith(MARK)]
    kernels = [
        Kernel(event.time_range.start, one.name, one.duration / 1e6)
        for event in asked for one in event.kernels if one.name not in names
    ]  # fmt: skip
    spans = [event for event in events if event.device_type != DeviceType.CPU and event.name not in names]
    operators = [event for event in asked if event.name not in names]
    if not kernels and platform.HAS_CUDA and ProfilerActivity.CUDA in supported_activities():
        raise RuntimeError(
            "the profiler recorded no kernels: another program reads them, or the driver lets administrators only"
        )
    loose = _loose(spans, kernels)
    if not kernels:
        kernels = [Kernel(event.time_range.start, event.name, event.self_cpu_time_total / 1e6) for event in operators]
    busy = _union(spans) if spans else sum(kernel.seconds for kernel in kernels)
    return Trace(
        marks=sorted((e.time_range.start, e.name.removeprefix(MARK)) for e in host if e.name.startswith(MARK)),
        kernels=kernels,
        packs=packs,
        seconds=seconds,
        idle=max(0.0, seconds - busy),
        loose=loose,
        shapes=len({str(event.input_shapes) for event in operators if event.name == f"aten::{ATTENTION}"}),
    )


def _loose(spans: Sequence[Any], kernels: Sequence[Kernel]) -> float:
    """Return seconds of kernels that the device ran and no operator is linked to."""
    found = dict[str, float]()
    spent = [(span.name, float(span.time_range.elapsed_us()) / 1e6) for span in spans]
    for name, seconds in (*spent, *((kernel.name, -kernel.seconds) for kernel in kernels)):
        found[name] = found.get(name, 0.0) + seconds
    return sum(seconds for seconds in found.values() if seconds > 0)


def _union(spans: Sequence[Any]) -> float:
    """Return seconds in which at least one of the spans lasts."""
    end = total = 0.0
    for start, until in sorted((event.time_range.start, event.time_range.end) for event in spans):
        total += max(0.0, until - max(start, end))
        end = max(end, until)
    return total / 1e6


@dataclass(frozen=True)
class Reach:
    """The rates that a card reaches, from which the least time of its work follows."""

    products: float
    """Operations a second of matrix products."""
    bytes: float
    """Bytes a second of memory."""
    attention: Mapping[str, float]
    """Operations a second of attention, by kind of layer."""
    source: str = ""
    """Where these rates are from, in words."""

    @classmethod
    def of(cls, device: str, attention: Mapping[str, str], peak: float | None = None) -> "Reach | None":
        """Return the rates of a card, or None if it is not known.

        Args:
            device: the card's name, as its driver has it.
            attention: the kernel that attends, by kind of layer.
            peak: operations a second of products, if they were measured.
        """
        key = device_key(device)
        if key is None:
            return None
        card = DEVICES[key]
        rates = {kind: card.flops * card.attending(name).attention_efficiency for kind, name in attention.items()}
        products, moved = peak or card.flops * PEAK, card.memory_bandwidth * card.bandwidth_efficiency
        attends = ", ".join(f"{kind} {rates[kind] / 1e12:.0f} ({name})" for kind, name in attention.items())
        source = (
            f"least by TFLOP/s of products {products / 1e12:.0f} ({'measured' if peak else 'assumed'}), of attention "
            f"{attends}, as analytic profiles have it, and {moved / 1e12:.1f} TB/s"
        )
        return cls(products, moved, rates, source)

    def least(self, group: Group, operations: float, moved: float) -> float:
        """Return the least seconds for so many operations and bytes moved of a group's kind of work."""
        kind = group[0].partition(" ")[0]
        rate = self.attention.get(kind, self.products) if group[1] == "attention" else self.products
        return max(operations / rate, moved / self.bytes)


def counted(model: str, packs: Path, count: int, seconds: float) -> Counted:
    """Count the launches, operations and bytes of an iteration of the first `count` packs of a file, by group.

    {} if that fails or takes more than `seconds`.
    """
    kind = platform.megatron_defaults().get("transformer_impl", "engine")
    command = [sys.executable, "-W", "ignore", "-c", COUNTING, kind, model, str(packs), str(count)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        print(f"launches could not be counted in {seconds:.0f} s")
        return {}
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
"""Values by column: what, how, launches and ms a pack; launches counted and least ms if they are known."""


def rows(trace: Trace, asked: Counted, counted_packs: int, reach: Reach | None) -> list[Row]:
    """Return the rows of the table: the largest groups of kernels and the sum of all others, which together have the
    milliseconds of all kernels; then the largest single kernels; then the device's idle time and its kernels without a
    layer.
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
    loose = _row("device", "not linked", trace.loose, trace.packs)
    return [*largest, *({**row, "within": True} for row in within), idle, loose]


def _largest(sums: Mapping[Group, float]) -> list[tuple[Group, float]]:
    return sorted(sums.items(), key=lambda pair: -pair[1])


def _row(what: str, how: str, seconds: float, packs: int, launches: int | None = None) -> Row:
    number: Row = {} if launches is None else {"launches": launches / packs}
    return {"what": what, "how": how[:WIDEST], **number, "ms": seconds / packs * 1e3}


def of_ways(found: Mapping[str, Mapping[str, float]], shapes: int) -> list[Row]:
    """Return rows for a layer's attention two ways (`benchmarks.gpu_ways`), and for cuDNN's plans in a run: one for
    each of `shapes`, each as long as the first call of a new size took more than a later one."""
    each = max(0.0, found[BATCH]["first ms"] - found[BATCH]["ms"])
    plans = {"what": "plans of cuDNN's", "how": f"{shapes} shapes, {each:.1f} ms each", "ms": shapes * each}
    ways: list[Row] = [
        {"what": name, "how": f"the first of another size {row['first ms']:.1f} ms", "ms": row["ms"]}
        for name, row in found.items()
    ]
    return [{**row, "within": True} for row in (*ways, plans)]


def shown(found: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the rows as the cells of a table."""
    columns = {"launches": ".0f", "launches counted": ".0f", "ms": ".3f", "least ms": ".3f"}
    table = []
    for row in found:
        cells = [format(row[name], how) if name in row else "-" for name, how in columns.items()]
        beyond = f"{row['ms'] - row['least ms']:.3f}" if "least ms" in row else "-"
        table.append((row["what"], row["how"], *cells, beyond))
    return table


def not_explained(found: Sequence[Row]) -> dict[str, float]:
    """Return by group the milliseconds a pack above the least, largest first; all of them if the least is not known."""
    beyond = {
        f"{row['what']} {row['how']}".strip(): more
        for row in found if "within" not in row and (more := row["ms"] - row.get("least ms", 0.0)) > 0
    }  # fmt: skip
    return dict(sorted(beyond.items(), key=lambda pair: -pair[1]))
