"""Measurement of one kind of layer: seconds by recompute mode and pack, bytes saved for backward, optimizer step."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.utils import unwrap_model
from megatron.training.training import get_megatron_optimizer_config
from scipy.optimize import nnls

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.profiling.kept import KeptBytes
from megatron.vlm.profiling.stage_pass import SplitBackward, StagePass, equal_lengths, synthetic_pack, wrapped_stage
from megatron.vlm.profiling.stopwatch import Run, Seconds, Timer
from omnibal_ext.chain import RECOMPUTABLE_KINDS, chain_kind, size_of
from omnibal_ext.costs.profile import UNCOMPILED, Fit, LayerCost
from omnibal_ext.modalities.language.layer import Layer
from omnibal_ext.modalities.modality import Budgets

SAMPLES = 4  # in the pack at the budgets
LAYERS = 2  # consecutive, if the chain has so many: for caches and the wrapper as in a real stage
CHEAP = "recompute_cheap"
MODES = ("recompute", CHEAP)


class KindMeasurement:
    """Measurements of one kind of layer. Values are per layer, for a pack at the budgets unless said otherwise.

    Timed functions are returned as runs, so that a stopwatch times all kinds in the same rounds: layouts compare kinds
    with each other, and a machine's speed changes over time.
    """

    def __init__(self, args: Namespace, chain: Chain, kind: str, budgets: Budgets) -> None:
        self.layer, self.count = _consecutive(kind, chain.architecture.cost_kinds)
        self.args, self.chain, self.kind = args, chain, kind
        layer = chain.architecture.layers[self.layer]
        self.grows_with_squares = isinstance(layer, Layer) and layer.attention is not None
        self.packs = self._packs(budgets)
        self.module = wrapped_stage(chain, self.layer, self.layer + self.count)
        self.mode = chain.gradient_mode(self.layer)
        weights = list(self.module.parameters())
        self.parameters = sum(map(_full_size, weights)) // self.count
        self.weights = sum(weight.numel() for weight in weights) / self.count
        """Parameters of a layer on this rank."""
        self.trained = sum(weight.numel() for weight in weights if weight.requires_grad) / self.count
        experts = [weight.numel() for weight in weights if weight.requires_grad and _is_expert_parallel(weight)]
        self.trained_experts = sum(experts) / self.count
        """Number of `trained` parameters that are expert-parallel."""
        self.modes = MODES if chain.kinds[self.layer] in RECOMPUTABLE_KINDS and self.mode != "idle" else ()
        self.cheap = wrapped_stage(chain, self.layer, self.layer + self.count, True) if self.modes else None
        """Layers as in `module`, built to recompute norms and activation functions."""
        self.kept = {mode: self._kept(mode) for mode in ("", *self.modes)}
        self.output_bytes = self._output_bytes()
        self.timer = Timer()
        """Timer of the runs without recomputation, at the budgets."""
        self.split = SplitBackward(args, chain, self.layer, self.count, self.packs[0]) if self.trained else None

    def _packs(self, budgets: Budgets) -> list[Microbatch]:
        """Make packs at the budgets and, for the fit, half as large; where attention counts, also one long sample.
        Those for an encoder have inputs of its modality alone.

        With sequence parallelism, padded to a multiple of the tensor-parallel size, as in training.
        """
        config = self.chain.language
        multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1

        def make(units: Budgets, tokens: int, samples: int = SAMPLES) -> Microbatch:
            tokens += -tokens % multiple
            return synthetic_pack(self.chain.architecture, units, equal_lengths(tokens, min(samples, tokens)))

        own, tokens = size_of(self.kind), budgets["tokens"]
        if own != "tokens":
            return [make({own: units}, tokens) for units in (budgets[own], max(1, budgets[own] // 2))]
        packs = [make(budgets, tokens), make({size: n // 2 for size, n in budgets.items()}, max(1, tokens // 2))]
        return [*packs, make(budgets, tokens, 1)] if self.grows_with_squares else packs

    def _features(self, pack: Microbatch) -> tuple[float, float, float]:
        """Return regressors of the layer's seconds: (1, tiles, frames or tokens, sum of squared sample lengths)."""
        if (size := size_of(self.kind)) != "tokens":
            return (1.0, pack.media_of(size).amount, 0.0)
        return (1.0, pack.tokens, float(sum(length**2 for length in pack.lengths)) * self.grows_with_squares)

    @property
    def stage(self) -> Stage:
        """The layers without the DDP wrapper."""
        stage: Stage = unwrap_model(self.module)
        return stage

    def runs(self) -> dict[str, Run]:
        """Return functions to time, by name; each returns seconds of all its layers.

        "0", "1", ...: (forward, backward) of that pack; "recompute", "recompute_cheap": (seconds it adds to "0",).
        "split": (forward, B, W) of the first pack, if trained. "empty": (forward, backward) without images and sounds.
        """
        plain = [self._run("", self.packs[0], self.timer), *(self._run("", pack) for pack in self.packs[1:])]
        found: dict[str, Run] = {str(number): run for number, run in enumerate(plain)}
        found |= {mode: self._recompute_run(mode, plain[0]) for mode in self.modes}
        if self.split is not None:
            found["split"] = self.split.run
        if size_of(self.kind) != "tokens":
            found["empty"] = self._run("", synthetic_pack(self.chain.architecture, {}, self.packs[0].lengths))
        return found

    def release(self) -> None:
        """Free the modules that `optimizer_runs` does not need."""
        self.cheap = None
        if self.split is not None:
            self.split.release()

    def optimizer_runs(self, args: Namespace) -> dict[str, Run]:
        """Return {"step": function that times an optimizer step of these layers}: scale, apply and zero gradients."""
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
        """Return the profile's entry of one layer, from `seconds`: those of each of `runs`, by name."""
        each = {name: tuple(s / self.count for s in taken) for name, taken in seconds.items()}
        forward, backward = zip(*(each[str(number)] for number in range(len(self.packs))), strict=True)
        added = {mode: each[mode][0] for mode in self.modes}
        extra = {f"{mode}_seconds": max(0.0, taken) for mode, taken in added.items()}
        extra |= {f"{mode}_kept_bytes": self.kept[mode] for mode in self.modes}
        f, b, w = each.get("split", (None, None, 0.0))
        if self.split is not None and f is not None and any(getattr(one, "region", 0) for one in self.module.modules()):
            host_f, *host_b = (taken / self.count for taken in self.split.timer.host_seconds)
            extra |= dict(zip(UNCOMPILED, (f, host_f, sum(host_b)), strict=True))
        features = [self._features(pack) for pack in self.packs]
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
        """Return the layers in a recompute mode: "recompute" (all), "recompute_cheap", or "" for none."""
        if mode == CHEAP:
            return self.cheap
        recompute(self.stage, mode == "recompute")
        return self.module

    def _run(self, mode: str, pack: Microbatch, timer: Timer | None = None) -> Run:
        in_flight: list[StagePass] = []
        timer = timer or Timer()

        def run() -> Seconds:
            # As in a pipeline, another microbatch is in flight, so that memory and caches are not reused at once.
            module = self._in_mode(mode)
            step = StagePass(self.chain, module, pack)

            def start(step: StagePass) -> None:
                step.forward()
                in_flight.append(step)

            def finish() -> None:
                in_flight.pop(0).backward()

            def both() -> None:
                start(StagePass(self.chain, module, pack))
                finish()

            if not in_flight:
                start(StagePass(self.chain, module, pack))
            forward, backward = timer(lambda: start(step), finish, before=both)
            return forward, backward if self.mode != "idle" else 0.0

        return run

    def _recompute_run(self, mode: str, plain: Run) -> Run:
        """Return a run of the seconds that a recompute mode adds to forward and backward, measured back to back."""
        recomputed = self._run(mode, self.packs[0])
        return lambda: (sum(recomputed()) - sum(plain()),)

    def _kept(self, mode: str) -> float:
        """Return the bytes of one layer saved for the backward, its input included; uncompiled, as it is under the
        count's hooks: a compiled layer keeps less, and not every schedule has any."""
        module = self._in_mode(mode)
        step = StagePass(self.chain, module, self.packs[0])
        with KeptBytes(module.parameters()) as kept:
            step.forward()
            if step.entering is not None and self.mode != "idle":
                kept.hold(step.entering.untyped_storage())
        recompute(self.stage, False)
        return (kept.bytes - self._extra_input_bytes(step)) / self.count

    def _extra_input_bytes(self, step: StagePass) -> float:
        """Return the bytes of the input besides the hidden states, which a stage holds once for all layers."""
        if step.entering is None or self.mode == "idle":
            return 0.0
        rows = self.chain.hidden_shape_before(self.stage.first, step.pack)[0]
        return float(step.entering[rows:].numel() * step.entering.element_size())

    def _output_bytes(self) -> float:
        step = StagePass(self.chain, self.module, self.packs[0])
        step.forward()
        assert step.output is not None
        total = float(step.output.numel() * step.output.element_size())
        if self.stage.post_process:
            return total
        return total * self.chain.hidden_shape_before(self.stage.end, step.pack)[0] / len(step.output)


def recompute(stage: Stage, enabled: bool) -> None:
    """Set all layers of a stage to be recomputed entirely, or not at all."""
    stage.recompute = frozenset(range(stage.first, stage.end) if enabled else ())


def _consecutive(kind: str, kinds: Sequence[str]) -> tuple[int, int]:
    """Return (index of the first, count) of consecutive layers of a kind in a chain, two if it has them, else one."""
    for count in range(LAYERS, 0, -1):
        starts = [i for i in range(len(kinds)) if tuple(kinds[i : i + count]) == (kind,) * count]
        if starts:
            # The last language layers, after which no image features are added.
            return starts[-1 if chain_kind(kind) == "llm" else 0], count
    raise ValueError(f"no layer of kind {kind}")


def fit_seconds(features: Sequence[tuple[float, float, float]], seconds: Sequence[float]) -> Fit:
    """Fit (constant, per unit, per square) >= 0 to seconds of packs; scaled to give the first pack's exactly."""
    matrix = np.array(features)
    scale = np.abs(matrix).max(axis=0).clip(min=1.0)
    found = nnls(matrix / scale, np.array(seconds))[0] / scale
    constant, linear, squares = (found * seconds[0] / (matrix[0] @ found)).tolist()
    return constant, linear, squares


def _full_size(weight: torch.nn.Parameter) -> int:
    """Return a weight's number of parameters over all ranks that shard it."""
    if _is_expert_parallel(weight):
        return weight.numel() * parallel_state.get_expert_model_parallel_world_size()
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return weight.numel() * (ranks if getattr(weight, "tensor_model_parallel", False) else 1)


def _is_expert_parallel(weight: torch.nn.Parameter) -> bool:
    """Return whether expert parallelism shards the weight, by core's attribute."""
    return not getattr(weight, "allreduce", True)
