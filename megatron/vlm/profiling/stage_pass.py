"""Forward and backward of a pack of random content through a single stage, to be timed; backward in one piece or split
into B and W."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.utils import unwrap_model
from megatron.training.training import get_model
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.media import Images
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.models.encoders import ENCODERS
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.pipeline.weight_gradients import Late, WeightGradients, accumulate
from megatron.vlm.profiling.stopwatch import Seconds, Timer
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.modality import Size


def wrapped_stage(chain: Chain, first: int, end: int, recompute_cheap: bool = False) -> Any:
    """Build layers [first, end) as a stage in Megatron's DDP wrapper, which accumulates gradients as in training.

    `recompute_cheap`: build it to recompute norms and activation functions.
    """

    def provide(**_: object) -> Stage:
        return Stage(chain, first, end, recompute_cheap=tuple(range(first, end)) if recompute_cheap else ())

    (module,) = get_model(provide, ModelType.encoder_or_decoder)
    return module


class StagePass:
    """Forward and backward of one pack through a stage, with random input if it is not the first."""

    def __init__(self, chain: Chain, module: torch.nn.Module, pack: Microbatch) -> None:
        self.module, self.pack, self.stage = module, pack, unwrap_model(module)
        self.output: Tensor | None = None
        self.entering: Tensor | None = None
        if self.stage.first > 0:
            takes_images = self.stage.kinds[0] == "word_embed"
            images = Images.of(pack).positions if takes_images else None
            rows = None if images is None else len(images)
            shape = chain.shape_before(self.stage.first, pack, rows)
            self.entering = torch.randn(shape, device="cuda", dtype=chain.language.pipeline_dtype)
            self.entering.requires_grad_(self.stage.sends_gradient)

    def forward(self) -> None:
        """Run the stage on the pack, and keep its output for `backward`."""
        self.stage.set_input_tensor(self.entering)
        self.output = self.module(self.pack)

    def backward(self) -> None:
        """Compute the gradients of trained weights, and of the input if the previous stage needs it."""
        if self.stage.has_backward:
            assert self.output is not None
            torch.autograd.backward(self.output, torch.ones_like(self.output))


class SplitBackward:
    """Layers built for a split backward (zero-bubble schedules), run with other microbatches in flight."""

    def __init__(self, args: Namespace, chain: Chain, first: int, count: int, pack: Microbatch) -> None:
        before, args.delay_wgrad_compute = args.delay_wgrad_compute, platform.HAS_TRANSFORMER_ENGINE
        self.chain = Chain.of(args, chain.architecture)
        self.module = wrapped_stage(self.chain, first, first + count)
        args.delay_wgrad_compute = before
        self.count, self.pack = count, pack
        self.gradients = WeightGradients()
        self.gradients.attach(unwrap_model(self.module))
        self.in_flight: list[StagePass] = []
        self.pending: list[list[Late]] = []
        self.timer = Timer()
        self.late_bytes = 0.0
        """Bytes that B of one layer keeps for W."""

    def run(self) -> Seconds:
        """Run forward, B and W, each of another microbatch as in a schedule; return the seconds of each."""
        if not self.in_flight:
            self._start()
            self._start()
            self._backward()
        step = StagePass(self.chain, self.module, self.pack)
        passes = (partial(self._start, step), self._backward, self._weight_gradients)
        taken = self.timer(*passes, before=self._full_pass)
        storages = [tensor.untyped_storage() for late in self.pending[-1] for tensor in late.held]
        self.late_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) / self.count
        return taken

    def release(self) -> None:
        """Free the module; `run` is not called after this."""
        self.in_flight.clear()
        self.pending.clear()
        del self.module

    def _full_pass(self) -> None:
        self._start()
        self._backward()
        self._weight_gradients()

    def _start(self, step: StagePass | None = None) -> None:
        self.in_flight.append(step or StagePass(self.chain, self.module, self.pack))
        self.in_flight[-1].forward()

    def _backward(self) -> None:
        late: list[Late] = []
        with self.gradients.delaying(late):
            self.in_flight.pop(0).backward()
        self.pending.append(late)

    def _weight_gradients(self) -> None:
        accumulate(self.pending.pop(0))


def synthetic_pack(architecture: Architecture, units: Mapping[Size, int], lengths: Sequence[int]) -> Microbatch:
    """Make a pack of random samples of these lengths (tokens) with, in all, `units` of tiles, mel frames and so on."""
    ids = torch.randint(0, architecture.language.vocab_size, (sum(lengths),), device="cuda")
    media = {
        one.modality.size: ENCODERS[one.modality].made_up(architecture, units.get(one.modality.size, 0), lengths)
        for one in architecture.encoders
    }
    return Microbatch(
        lengths=tuple(lengths),
        samples=len(lengths),
        useful_tokens=sum(lengths),
        prefixes=tuple(lengths),
        media=media,
        input_ids=ids,
        labels=ids,
        loss_mask=torch.ones(sum(lengths), device="cuda"),
    )


def equal_lengths(tokens: int, samples: int) -> list[int]:
    """Divide `tokens` over samples as equally as possible; return the tokens of each."""
    return [tokens // samples + (sample < tokens % samples) for sample in range(samples)]
