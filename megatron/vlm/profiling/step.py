"""What is timed: forward and backward of one pack through a stage alone, the backward in one part or in two."""

from argparse import Namespace
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.utils import unwrap_model
from megatron.training.training import get_model
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.pipeline.weight_gradients import Late, WeightGradients, accumulate
from megatron.vlm.profiling.stopwatch import Seconds, Timer


def wrapped_stage(chain: Chain, first: int, end: int, cheap: bool = False) -> Any:
    """Links [first, end) as a stage in Megatron's wrapper, so that gradients are accumulated as in training.

    `cheap`: built to compute their cheap outputs again.
    """

    def provide(**_: object) -> Stage:
        return Stage(chain, first, end, recompute_cheap=tuple(range(first, end)) if cheap else ())

    (module,) = get_model(provide, ModelType.encoder_or_decoder)
    return module


class Step:
    """Forward and backward of one pack through a stage, without neighbours."""

    def __init__(self, chain: Chain, module: torch.nn.Module, pack: Microbatch) -> None:
        self.module, self.pack, self.stage = module, pack, unwrap_model(module)
        self.output: Tensor | None = None
        self.entering: Tensor | None = None
        if self.stage.first > 0:
            shape = list(chain.shape_before(self.stage.first, pack))
            if self.stage.kinds[0] == "word_embed":
                assert pack.image_positions is not None
                shape[0] = len(pack.image_positions) * (1 + chain.features_before(self.stage.first, pack))
            self.entering = torch.randn(shape, device="cuda", dtype=chain.language.pipeline_dtype)
            self.entering.requires_grad_(self.stage.sends_gradient)

    def forward(self) -> None:
        """Run the stage."""
        self.stage.set_input_tensor(self.entering)
        self.output = self.module(self.pack)

    def backward(self) -> None:
        """Gradients of what is trained, and of the input where the stage before has a use for it."""
        if self.stage.has_backward:
            assert self.output is not None
            torch.autograd.backward(self.output, torch.ones_like(self.output))


class SplitBackward:
    """Layers made for zero-bubble schedules, as a plan's schedule has them made, with microbatches in flight."""

    def __init__(self, args: Namespace, chain: Chain, first: int, count: int, pack: Microbatch) -> None:
        before, args.delay_wgrad_compute = args.delay_wgrad_compute, platform.HAS_TRANSFORMER_ENGINE
        self.chain = Chain.of(args, chain.architecture)
        self.module = wrapped_stage(self.chain, first, first + count)
        args.delay_wgrad_compute = before
        self.count, self.pack = count, pack
        self.gradients = WeightGradients()
        self.gradients.attach(unwrap_model(self.module))
        self.flying: list[Step] = []
        self.waiting: list[list[Late]] = []
        self.timer = Timer()
        self.late_bytes = 0.0
        """Of one layer: what B leaves for W."""

    def run(self) -> Seconds:
        """(forward, B, W): of three microbatches, as one lies between another's F, B and W in a schedule."""
        if not self.flying:
            self._start()
            self._start()
            self._backward()
        step = Step(self.chain, self.module, self.pack)
        parts = (partial(self._start, step), self._backward, self._weight_gradients)
        taken = self.timer(*parts, before=self._all_three)
        storages = [tensor.untyped_storage() for late in self.waiting[-1] for tensor in late.held]
        self.late_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) / self.count
        return taken

    def release(self) -> None:
        """Make room: nothing is run again."""
        self.flying.clear()
        self.waiting.clear()
        del self.module

    def _all_three(self) -> None:
        self._start()
        self._backward()
        self._weight_gradients()

    def _start(self, step: Step | None = None) -> None:
        self.flying.append(step or Step(self.chain, self.module, self.pack))
        self.flying[-1].forward()

    def _backward(self) -> None:
        late: list[Late] = []
        with self.gradients.put_aside(late):
            self.flying.pop(0).backward()
        self.waiting.append(late)

    def _weight_gradients(self) -> None:
        accumulate(self.waiting.pop(0))
