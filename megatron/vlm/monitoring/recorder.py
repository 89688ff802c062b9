"""Records of what every rank does in some iterations: one line each of timeline.jsonl, which `omnibal report` draws.

    {"iteration": 5, "device": "2 x AMD EPYC", "lanes": [{"data_parallel_rank": 0, "rank": 0, "end": 0.21,
      "actions": [["F", 0, 0, 0.001, 0.013, [["vit", "forward", 0.010], ["projector", "forward", 0.002]]], ...],
      "reads": [[0.0, 0.001], ...], "held": [[0.013, 8123456], ...],
      "packs": [[tiles, tokens, sum of squared lengths, tokens sent to others of a team, its ranks,
                 mel frames if it has sounds, and so on], ...]}, ...]}

Seconds count from when the first rank leaves the barrier before the iteration. An action is (kind, microbatch, chunk,
start, end, pieces); reads are (start, end) of the waits for packs. A lane is one pipeline rank of one data-parallel
rank, at tensor-parallel rank 0.
"""

import socket
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.exchange import watched
from megatron.vlm.monitoring.stage_meter import ProfileCheck
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.platform import Moment, allocated_bytes, device_name
from omnibal_ext.chain import TIMED_PART_OF
from omnibal_ext.costs.corrected import EXCHANGE, OTHER
from omnibal_ext.files.records import JsonLines
from omnibal_ext.modalities.modality import FURTHER, VISION
from omnibal_ext.report.timeline import PHASES
from omnibal_ext.schedules.actions import Action

WARM_UP = 3  # iterations


def recorded_iterations(iterations: int, count: int) -> frozenset[int]:
    """Return the iterations to record, from 1: `count` spread evenly over a run after the warm-up. Never two in
    succession: the next one begins with the gathering of its records."""
    first = min(WARM_UP + 1, iterations)
    steps = max(1, min(count, (iterations - first) // 2 + 1)) - 1
    evenly = {first + round(n * (iterations - first) / max(1, steps)) for n in range(steps + 1)}
    return frozenset(evenly if count else ())


@dataclass
class Timed:
    """Start and end of an action, and the moments at which another part of the model began."""

    action: Action
    start: Moment
    marks: list[tuple[Moment, str, str]] = field(default_factory=list)
    """(moment, part of the model, phase): the part runs from that moment on."""
    end: Moment | None = None
    held: int | None = None

    def record(self, origin: Moment) -> list[Any]:
        """Return the action as in timeline.jsonl, in seconds from `origin`; waits until the device has finished it."""
        assert self.end is not None
        phase = PHASES[self.action.kind]
        edges = [(self.start, OTHER, phase), *self.marks]
        ends = [moment for moment, _, _ in edges[1:]] + [self.end]
        pieces: list[list[Any]] = []
        for (moment, part, what), until in zip(edges, ends, strict=True):
            seconds = moment.seconds_until(until)
            if pieces and pieces[-1][:2] == [part, what]:
                pieces[-1][2] += seconds
            else:
                pieces.append([part, what, seconds])
        start, end = origin.seconds_until(self.start), origin.seconds_until(self.end)
        return [self.action.kind, self.action.microbatch, self.action.chunk, start, end, pieces]


class Recorder:
    """A timer of this rank's actions, and counter of bytes held, in some iterations; gathers and writes them.

    1. Before a recorded iteration all ranks meet at a barrier; time 0 is when the first rank leaves it.
    2. Events are recorded around every action and every wait for a pack, and, by hooks, where a part of the model
       begins its forward, recomputation or backward. Nothing waits for them.
    3. The iteration ends with the last optimizer step in it.
    4. Bytes are the allocator's, on a GPU only.
    5. Before the next iteration, or when training ends, the last rank gathers and writes the records.
    """

    def __init__(self, path: Path | None, iterations: Collection[int], check: ProfileCheck | None = None) -> None:
        """Record `iterations` to `path` (None: none), and for `check` those it wants that are next to none of them."""
        self.lines, self.check = JsonLines(path) if path else None, check
        self.iterations = frozenset(iterations if path else ())
        self.number = 0
        self.origin: Moment | None = None
        self.clock = 0.0
        self.timed: list[Timed] = []
        self.packs: list[list[int]] = []
        self.reads: list[tuple[Moment, Moment]] = []
        self.step_ended: Moment | None = None
        self.actions_ended: Moment | None = None
        self._current: Timed | None = None
        self._step_hook: Any = None

    @contextmanager
    def iteration(self, number: int, model: Sequence[Any]) -> Iterator[None]:
        """Make a context for the actions of iteration `number` (0: evaluation), timed if it is to be recorded. The
        record of an earlier one is gathered and written first; collective then."""
        if self._step_hook is not None:
            self._step_hook.remove()
        if self.origin is not None:
            self._write()
        modules = model if isinstance(model, list) else [model]
        with self._timed(number, modules) if self._records(number) else nullcontext():
            yield

    def _records(self, number: int) -> bool:
        for_check = self.check is not None and self.check.wants(number)
        return number in self.iterations or (for_check and not {number - 1, number + 1} & self.iterations)

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        """Make a context around the computing of one action, which is timed in iterations to be recorded."""
        if not self._is_timing:
            yield
            return
        self._current = Timed(action, Moment())
        yield
        self._current.end, self._current.held = Moment(), allocated_bytes()
        self.timed.append(self._current)
        self._current = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Make a context that times a wait for a pack; zero if the device was busy meanwhile: it then cost nothing."""
        if not self._is_timing:
            yield
            return
        start = Moment()
        yield
        self.reads.append((start, Moment()))

    @property
    def _is_timing(self) -> bool:
        """Whether the actions of an iteration are being timed."""
        return self._step_hook is not None and self.actions_ended is None

    def add_pack(self, batch: Microbatch) -> None:
        """Note the sizes of the pack whose forward begins, if it is timed and on this rank's first chunk."""
        if self._current is not None and self._current.action.kind == "F" and self._current.action.chunk == 0:
            sent = (0, 1) if batch.shard is None else (batch.shard.sent_tokens, batch.shard.width)
            further = [batch.media_of(one.size).amount for one in FURTHER]
            while further and not further[-1]:
                further.pop()
            self.packs.append([batch.media_of(VISION.size).amount, batch.tokens, batch.squares, *sent, *further])

    def close(self) -> None:
        """Write what is left when training has ended."""
        if self.origin is not None:
            self._step_hook.remove()
            self._write()
        if self.check is not None:
            self.check.close()

    @contextmanager
    def _timed(self, number: int, modules: Sequence[Any]) -> Iterator[None]:
        self.number, self.timed, self.packs, self.reads = number, [], [], []
        self.step_ended = self.actions_ended = None
        self._step_hook = register_optimizer_step_post_hook(self._after_step)
        hooks = [hook for module in modules for hook in self._mark_parts(unwrap_model(module))]
        watched.by = self._exchanging
        torch.distributed.barrier()
        self.origin, self.clock = Moment(), time.perf_counter()
        yield
        self.actions_ended = Moment()
        watched.by = nullcontext
        for hook in hooks:
            hook.remove()

    def _after_step(self, *_: Any) -> None:
        """Note when an optimizer step has ended; the last one's end is the iteration's."""
        self.step_ended = Moment()

    def _mark_parts(self, stage: Stage) -> Iterator[Any]:
        for layer, module in stage.run_layers:
            part = TIMED_PART_OF[stage.chain.kinds[layer]]
            yield module.register_forward_pre_hook(partial(self._before_layer, part))
            yield module.register_forward_hook(partial(self._after_layer, part))

    def _before_layer(self, part: str, *_: Any) -> None:
        if self._current is not None:
            recomputes = self._current.action.kind in "BV"
            self._mark(part, "recompute" if recomputes else "forward")

    def _after_layer(self, part: str, _: Any, __: Any, output: Any) -> None:
        if self._current is not None and isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: self._mark(part, "backward"))

    @contextmanager
    def _exchanging(self, backward: bool) -> Iterator[None]:
        """Wrap an exchange between ranks of a team inside a part of the model, which continues after it."""
        if self._current is None:
            yield
            return
        kind = self._current.action.kind
        interrupted = self._current.marks[-1][1:] if self._current.marks else (OTHER, PHASES[kind])
        self._mark(EXCHANGE, "backward" if backward else "recompute" if kind in "BV" else "forward")
        yield
        self._mark(*interrupted)

    def _mark(self, part: str, phase: str) -> None:
        if self._current is not None:
            self._current.marks.append((Moment(), part, phase))

    def _write(self) -> None:
        """Gather the iteration; the last rank appends it to the file and hands it to the profile check."""
        lanes = _gathered(self._lane() if parallel_state.get_tensor_model_parallel_rank() == 0 else None)
        self.origin = self._step_hook = None
        if not lanes:
            return
        record = {"iteration": self.number, "device": device_name(), "lanes": lanes}
        if self.lines is not None and self.number in self.iterations:
            self.lines.append(record)
        if self.check is not None:
            self.check.add(record)

    def _lane(self) -> dict[str, Any]:
        assert self.origin is not None
        assert self.actions_ended is not None
        actions = [timed.record(self.origin) for timed in self.timed]
        held = [(record[4], timed.held) for record, timed in zip(actions, self.timed, strict=True)]
        return {
            "host": socket.gethostname(),
            "clock": self.clock,
            "data_parallel_rank": parallel_state.get_data_parallel_rank(),
            "rank": parallel_state.get_pipeline_model_parallel_rank(),
            "end": self.origin.seconds_until(self.step_ended or self.actions_ended),
            "actions": actions,
            "reads": [[self.origin.seconds_until(moment) for moment in read] for read in self.reads],
            "held": [point for point in held if point[1] is not None],
            "packs": self.packs,
        }


def _gathered(mine: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Gather what each pipeline rank recorded (its lane), times aligned, on the last rank; else []. Collective."""
    last = torch.distributed.get_world_size() - 1
    everyone: list[Any] | None = [None] * (last + 1) if torch.distributed.get_rank() == last else None
    torch.distributed.gather_object(mine, everyone, dst=last)
    lanes = [lane for lane in everyone or () if lane is not None]
    return sorted(aligned(lanes), key=lambda lane: (lane["data_parallel_rank"], lane["rank"]))


def aligned(lanes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the ranks' records (lanes) with one time 0 per machine: when its first rank left the barrier.

    Ranks leave it at different times; ranks of one machine share a clock, so there the difference is removed.
    """
    first: dict[str, float] = {}
    for lane in lanes:
        first[lane["host"]] = min(first.get(lane["host"], lane["clock"]), lane["clock"])
    return [_shifted(lane, lane["clock"] - first[lane["host"]]) for lane in lanes]


def _shifted(lane: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the lane with all times shifted by `seconds`, without the fields that only `aligned` needs."""
    actions = [[*action[:3], action[3] + seconds, action[4] + seconds, action[5]] for action in lane["actions"]]
    reads = [[start + seconds, end + seconds] for start, end in lane["reads"]]
    held = [[at + seconds, *held] for at, *held in lane["held"]]
    rest = {name: value for name, value in lane.items() if name not in ("host", "clock")}
    return rest | {"end": lane["end"] + seconds, "actions": actions, "reads": reads, "held": held}
