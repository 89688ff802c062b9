"""Measures one kind of layer: seconds in every mode and on several packs, bytes kept, its optimizer step."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.utils import unwrap_model
from megatron.training.training import get_megatron_optimizer_config

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.profiling.kept import KeptBytes
from megatron.vlm.profiling.step import SplitBackward, Step, wrapped_stage
from megatron.vlm.profiling.stopwatch import Run, Seconds, Timer
from megatron.vlm.profiling.synthetic import equal_lengths, synthetic_pack
from omnibal_ext.chain import KIND_OF, RECOMPUTABLE_KINDS, SQUARED_KINDS, VISION_KINDS
from omnibal_ext.costs.profile import Fit, LayerCost

SAMPLES = 4  # of the pack that is measured at the budgets
LAYERS = 2  # of a kind that the chain has several of: caches and wrappers then weigh about as in a real stage
CHEAP = "recompute_cheap"
MODES = ("recompute", CHEAP)


class KindMeasurement:
    """The figures of one kind of layer, all of one layer, at the budgets unless said.

    What is timed is handed out as runs, so that all kinds are timed in the same rounds: layouts trade one kind for
    another, and machines are faster at one time than at another.
    """

    def __init__(self, args: Namespace, chain: Chain, kind: str, budgets: tuple[int, int]) -> None:
        self.link, self.count = _some(kind, chain.architecture.cost_kinds)
        self.args, self.chain, self.kind = args, chain, kind
        self.packs = _packs(chain, kind, *budgets)
        self.module = wrapped_stage(chain, self.link, self.link + self.count)
        self.mode = chain.gradient_mode(self.link)
        weights = list(self.module.parameters())
        self.parameters = sum(map(_whole_size, weights)) // self.count
        self.weights = sum(weight.numel() for weight in weights) / self.count
        """On this tensor-parallel rank."""
        self.trained = sum(weight.numel() for weight in weights if weight.requires_grad) / self.count
        dealt = [weight.numel() for weight in weights if weight.requires_grad and _is_dealt(weight)]
        self.dealt = sum(dealt) / self.count
        """Of those, of experts that lie on some ranks."""
        self.modes = MODES if chain.kinds[self.link] in RECOMPUTABLE_KINDS and self.mode != "idle" else ()
        self.cheap = wrapped_stage(chain, self.link, self.link + self.count, cheap=True) if self.modes else None
        """The same layers, built to compute their cheap outputs again."""
        self.kept = {mode: self._kept(mode) for mode in ("", *self.modes)}
        self.output_bytes = self._output_bytes()
        self.timer = Timer()
        """Of plain layers at the budgets."""
        self.split = SplitBackward(args, chain, self.link, self.count, self.packs[0]) if self.trained else None

    @property
    def stage(self) -> Stage:
        """The layers, without the wrapper."""
        stage: Stage = unwrap_model(self.module)
        return stage

    def runs(self) -> dict[str, Run]:
        """(forward, backward) of each pack, by its number; by recompute mode, what it adds on the first pack.

        "split": (forward, B, W) of the first pack, where the layer is trained. "empty": a pack without tiles.
        """
        plain = [self._run("", self.packs[0], self.timer), *(self._run("", pack) for pack in self.packs[1:])]
        found: dict[str, Run] = {str(number): run for number, run in enumerate(plain)}
        found |= {mode: self._added(mode, plain[0]) for mode in self.modes}
        if self.split is not None:
            found["split"] = self.split.run
        if self.kind in VISION_KINDS:
            found["empty"] = self._run("", synthetic_pack(self.chain.architecture, 0, self.packs[0].lengths))
        return found

    def make_room(self) -> None:
        """Of all that was timed only the plain layers are left, for their optimizer."""
        self.cheap = None
        if self.split is not None:
            self.split.release()

    def optimizer_runs(self, args: Namespace) -> dict[str, Run]:
        """All layers' step: what comes between the last backward of an iteration and the first forward of the next."""
        config, overrides = get_megatron_optimizer_config(args)
        groups = args.use_gloo_process_groups
        optimizer = get_megatron_optimizer(config, [self.module], overrides, use_gloo_process_groups=groups)

        def finish() -> None:
            self.module.scale_gradients(1.0)
            optimizer.step()
            self.module.zero_grad_buffer()
            optimizer.zero_grad()

        timer = Timer()
        return {"step": lambda: timer(finish)}

    def cost(self, seconds: dict[str, Seconds], weight_bytes: float, step_seconds: float) -> LayerCost:
        """The profile's entry, from what `runs` took."""
        each = {name: tuple(s / self.count for s in taken) for name, taken in seconds.items()}
        forward, backward = zip(*(each[str(number)] for number in range(len(self.packs))), strict=True)
        added = {mode: each[mode][0] for mode in self.modes}
        extra = {f"{mode}_seconds": max(0.0, taken) for mode, taken in added.items()}
        extra |= {f"{mode}_kept_bytes": self.kept[mode] for mode in self.modes}
        _, b, w = each.get("split", (None, None, 0.0))
        features = [_features(self.kind, pack) for pack in self.packs]
        host_forward, host_backward = (taken / self.count for taken in self.timer.host_seconds)
        return LayerCost(
            forward_seconds=forward[0],
            backward_seconds=backward[0],
            kept_bytes=self.kept[""],
            weight_bytes=weight_bytes,
            output_bytes=self.output_bytes,
            weight_gradient_seconds=w,
            split_backward_seconds=None if b is None else b + w,
            late_bytes=self.split.late_bytes if self.split else 0.0,
            empty_seconds=sum(each.get("empty", ())),
            host_forward_seconds=host_forward,
            host_backward_seconds=host_backward if self.mode != "idle" else 0.0,
            step_seconds=step_seconds,
            forward_fit=fit_seconds(features, forward),
            backward_fit=fit_seconds(features, backward) if self.mode != "idle" else (0.0, 0.0, 0.0),
            **{"recompute_kept_bytes": self.kept[""], **extra},
        )

    def _in_mode(self, mode: str) -> Any:
        """The layers, put into one of `MODES`, or "" for none: what `Stage` sets up when it is built."""
        if mode == CHEAP:
            return self.cheap
        recompute(self.stage, mode == "recompute")
        return self.module

    def _run(self, mode: str, pack: Microbatch, timer: Timer | None = None) -> Run:
        flying: list[Step] = []
        timer = timer or Timer()

        def run() -> Seconds:
            # As in a pipeline, another microbatch is in flight: its memory is not at hand, nor is it in the caches.
            module = self._in_mode(mode)
            step = Step(self.chain, module, pack)

            def start(step: Step) -> None:
                step.forward()
                flying.append(step)

            def finish() -> None:
                flying.pop(0).backward()

            def both() -> None:
                start(Step(self.chain, module, pack))
                finish()

            if not flying:
                start(Step(self.chain, module, pack))
            forward, backward = timer(lambda: start(step), finish, before=both)
            return forward, backward if self.mode != "idle" else 0.0

        return run

    def _added(self, mode: str, plain: Run) -> Run:
        """Seconds that a recompute mode adds to forward and backward together.

        A difference of two runs back to back: a disturbance of both leaves it as it is.
        """
        again = self._run(mode, self.packs[0])
        return lambda: (sum(again()) - sum(plain()),)

    def _kept(self, mode: str) -> float:
        """Bytes kept for the backward pass, the input among them."""
        module = self._in_mode(mode)
        step = Step(self.chain, module, self.packs[0])
        with KeptBytes(module.parameters()) as kept:
            step.forward()
            if step.entering is not None and self.mode != "idle":
                kept.hold(step.entering.untyped_storage())
        recompute(self.stage, False)
        return (kept.bytes - self._beside(step)) / self.count

    def _beside(self, step: Step) -> float:
        """Bytes that entered beside the hidden states: those a stage holds once, however many layers read them."""
        if step.entering is None or self.mode == "idle":
            return 0.0
        rows = self.chain.hidden_shape_before(self.stage.first, step.pack)[0]
        return float(step.entering[rows:].numel() * step.entering.element_size())

    def _output_bytes(self) -> float:
        step = Step(self.chain, self.module, self.packs[0])
        step.forward()
        assert step.output is not None
        whole = float(step.output.numel() * step.output.element_size())
        if self.stage.post_process:
            return whole
        return whole * self.chain.hidden_shape_before(self.stage.end, step.pack)[0] / len(step.output)


def recompute(stage: Stage, again: bool) -> None:
    """Recompute all layers of a stage whole, or none."""
    stage.recompute = frozenset(range(stage.first, stage.end) if again else ())


def _some(kind: str, kinds: Sequence[str]) -> tuple[int, int]:
    """Where in the chain `LAYERS` of a kind follow each other, or fewer, and how many."""
    for count in range(LAYERS, 0, -1):
        places = [i for i in range(len(kinds)) if tuple(kinds[i : i + count]) == (kind,) * count]
        if places:
            return places[
                -1 if KIND_OF.get(kind, kind) == "llm" else 0
            ], count  # no features enter behind the last language layers
    raise ValueError(f"no layer of kind {kind}")


def _packs(chain: Chain, kind: str, tiles: int, tokens: int) -> list[Microbatch]:
    """Packs at the budgets and, for the fit, half as large and otherwise divided.

    Under sequence parallelism filled up until the tensor-parallel group divides their tokens, as in training.
    """
    config = chain.language
    multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1

    def make(tiles: int, tokens: int, samples: int = SAMPLES) -> Microbatch:
        tokens += -tokens % multiple
        return synthetic_pack(chain.architecture, tiles, equal_lengths(tokens, min(samples, tokens)))

    if kind in VISION_KINDS:
        return [make(tiles, tokens), make(max(1, tiles // 2), tokens)]
    packs = [make(tiles, tokens), make(tiles // 2, max(1, tokens // 2))]
    return [*packs, make(tiles, tokens, 1)] if kind in SQUARED_KINDS else packs


def _features(kind: str, pack: Microbatch) -> tuple[float, float, float]:
    """What the time of a layer depends on: a constant, units (tiles or tokens), squared sample lengths."""
    if kind in VISION_KINDS:
        return (1.0, pack.tiles, 0.0)
    return (1.0, pack.tokens, float(sum(length**2 for length in pack.lengths)) if kind in SQUARED_KINDS else 0.0)


def fit_seconds(features: Sequence[tuple[float, float, float]], seconds: Sequence[float]) -> Fit:
    """Coefficients, none negative, that meet the time at the budgets exactly and the others as well as they can."""
    matrix, times = np.array(features), np.array(seconds)
    used = [column for column in range(3) if matrix[:, column].any()]
    while True:
        scale = np.abs(matrix[:, used]).max(axis=0)
        found = np.linalg.lstsq(matrix[:, used] / scale, times, rcond=None)[0] / scale
        if (found >= 0).all() or len(used) == 1:
            break
        used.remove(used[int(np.argmin(found * scale))])
    coefficients = np.zeros(3)
    coefficients[used] = found
    coefficients *= times[0] / (matrix[0] @ coefficients)
    return float(coefficients[0]), float(coefficients[1]), float(coefficients[2])


def _whole_size(weight: torch.nn.Parameter) -> int:
    """Numbers in a weight over all tensor-parallel ranks; for that of a dealt expert, in those of all ranks."""
    if _is_dealt(weight):
        return weight.numel() * parallel_state.get_expert_model_parallel_world_size()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return weight.numel() * (ranks if getattr(weight, "tensor_model_parallel", False) else 1)


def _is_dealt(weight: torch.nn.Parameter) -> bool:
    """Whether it is an expert's that lies on some ranks, whole: core's mark."""
    return not getattr(weight, "allreduce", True)
