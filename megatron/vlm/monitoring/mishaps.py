"""What goes wrong inside an iteration, found by all ranks together so that they stay in step.

1. A sample whose images cannot be read any more, or are not what was preprocessed, has stand-ins of their shape: it is
   named, weighs nothing in the loss from then on, and the iteration is run again, as the ranks that weigh did not know.
2. A loss or a gradient that is not finite: microbatches and samples are named, and the optimizer leaves the step out.
   So it does where gradients overflow under a loss scale, which falls until they do not; one that cannot fall is said.

Both are counted, and end the run past a limit. Hosts ask hosts for the first, which no device knows; the second is seen
in the norm of the gradients, which Megatron sums over the ranks and reads: no device is waited for.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import get_args, print_rank_0, training
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.microbatch import Microbatch
from omnibal_ext.errors import UserError
from omnibal_ext.output import printable

SHOWN = 4
"""Microbatches named in a line."""


class Hosts:
    """What the hosts of all ranks tell each other, without their devices."""

    @cached_property
    def group(self) -> dist.ProcessGroup | None:
        """All ranks; all of them ask for it first at the same place."""
        return platform.host_group(timedelta(minutes=get_args().distributed_timeout_minutes))

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank; every rank calls it."""
        together = torch.tensor([float(flag)])
        dist.all_reduce(together, group=self.group)
        return together.item() > 0


@dataclass
class BadSamples:
    """The samples of a dataset that weigh nothing, as all ranks know them."""

    data: str
    limit: int
    known: dict[int, str] = field(default_factory=dict)
    """Why, by sample."""
    found: dict[int, str] = field(default_factory=dict)
    """Those that this rank has met in this iteration and not all know of."""

    def saw(self, batch: Microbatch) -> None:
        """Note the samples of a microbatch that have stand-ins."""
        self.found |= {sample: why for sample, why in batch.broken if sample not in self.known}

    def silence(self, batch: Microbatch) -> Microbatch:
        """The same microbatch, without weight for samples that are known."""
        segments = [number for number, sample in enumerate(batch.sample_ids) if sample in self.known]
        if segments and batch.targets is not None:
            places = torch.tensor(segments, device=batch.targets.device)
            batch = replace(batch, targets=batch.targets.index_fill(0, places, 0.0))
        if not segments or batch.loss_mask is None or batch.segment_ids is None:
            return batch
        heard = torch.ones(len(batch.whole.lengths))
        heard[segments] = 0.0
        return replace(batch, loss_mask=batch.loss_mask * platform.to_device(heard)[batch.segment_ids])

    def share(self) -> None:
        """Let all ranks know what any has found; every rank calls it. Raises UserError past the limit."""
        everyone: list[dict[int, str]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, self.found)
        new = {sample: why for found in everyone for sample, why in found.items() if sample not in self.known}
        self.known |= new
        self.found = {}
        for _, why in sorted(new.items()):
            said = f"warning: {why}: it weighs nothing from now on ({len(self.known)} of {self.limit} such samples)"
            print_rank_0(printable(said))
        if len(self.known) > self.limit:
            raise UserError(
                f"{len(self.known)} samples of {self.data} have images that cannot be used, limit {self.limit}: "
                f"{new[min(new)]}; see to the images, or raise --max-bad-samples"
            )


class BadSteps:
    """Steps that are left out because a loss or a gradient was not finite."""

    def __init__(self, limit: int, hosts: Hosts) -> None:
        """limit: so many in a row are left out, one more ends the run."""
        self.limit, self.hosts = limit, hosts
        self.in_a_row = self.total = self.iteration = 0
        """`total` counts those too after which the loss scale has fallen, which are as they should be."""
        self.losses: list[tuple[str, Tensor]] = []
        """Of each microbatch what to call it, and its loss; not the pack itself, whose pixels would stay."""

    def install(self, then: Callable[[int, bool], None]) -> None:
        """Judge the steps of the optimizer that Megatron makes; `then(iteration, left out)` on all ranks alike."""
        make = training.get_megatron_optimizer

        def get_megatron_optimizer(*arguments: Any, **named: Any) -> Any:
            optimizer = make(*arguments, **named)
            self.watch(optimizer, then)
            return optimizer

        training.get_megatron_optimizer = get_megatron_optimizer

    def watch(self, optimizer: Any, then: Callable[[int, bool], None]) -> None:
        """Let an optimizer leave unsound steps out, as it does those of which scaled gradients overflow.

        It readies the gradients, asks for their norm, and steps. The norm is taken a moment sooner here, and once. What
        overflows under a loss scale is the scaler's affair, unless a loss was not finite before it was scaled, or the
        scale is as low as it may be.
        """
        prepare, norm, scale = optimizer.prepare_grads, optimizer.get_grad_norm, optimizer.get_loss_scale

        def prepare_grads() -> bool:
            before = scale()
            overflow = prepare()
            if overflow:
                unsound = self.hosts.any(not all(bool(total.isfinite()) for _, total in self.losses))
            else:
                found = norm()
                optimizer.get_grad_norm = lambda: found
                unsound = not math.isfinite(found)
            if unsound:
                self.settle(self._where(), "lower --lr, or look at these samples")
            elif overflow:
                self._overflowed(before, optimizer.config)
            else:
                self.in_a_row = 0
            then(self.iteration, unsound)
            return overflow or unsound

        optimizer.prepare_grads = prepare_grads

    def _overflowed(self, scale: Tensor, config: Any) -> None:
        """Gradients overflowed under a scale: a step to be counted, and one to be told of where it cannot fall."""
        least = config.loss_scale or config.min_loss_scale
        if bool(scale > least):
            self.total += 1
            return
        where = f"gradients overflow under a loss scale of {scale.item():g}, which falls no further"
        self.settle(where, "lower --loss-scale" if config.loss_scale else "lower --min-loss-scale, or --lr")

    def begin(self, iteration: int) -> None:
        """Forget the iteration before, or the first try of this one."""
        self.iteration, self.losses = iteration, []

    def saw(self, batch: Microbatch, total: Tensor, normaliser: Tensor) -> Tensor:
        """Note the loss of a microbatch; waits for nothing.

        The normaliser as it is to be used: of a loss that is not finite it is no number, and so are then all gradients
        on all ranks, which are divided by the normalisers' sum.
        """
        name = f"(pack {batch.pack}, samples {', '.join(map(str, batch.sample_ids))})"
        self.losses.append((name, total.detach()))
        return normaliser + 0 * total.detach()

    def settle(self, where: str, remedy: str) -> None:
        """Count and name a step that is to be left out; every rank calls it. Raises UserError past the limit."""
        self.in_a_row += 1
        self.total += 1
        said = f"the step is left out ({self.in_a_row} in a row, {self.total} since the start)"
        print_rank_0(printable(f"warning: iteration {self.iteration}: {where}: {said}"))
        if self.in_a_row > self.limit:
            raise UserError(
                f"iteration {self.iteration}: {where}; {self.in_a_row} steps in a row were not finite, limit "
                f"{self.limit} (--max-bad-steps): {remedy}; the run goes on from its last save"
            )

    def _where(self) -> str:
        rank = parallel_state.get_data_parallel_rank()
        mine = [
            f"microbatch {number} of data-parallel rank {rank} {name}"
            for number, (name, total) in enumerate(self.losses)
            if parallel_state.get_tensor_model_parallel_rank() == 0 and not bool(torch.isfinite(total))
        ]
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        named = [one for rank_s in everyone for one in rank_s]
        if not named:
            return "gradients are not finite, though all losses are"
        more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
        return f"the loss is not finite in {'; '.join(named[:SHOWN])}{more}"
