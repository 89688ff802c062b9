"""Samples with unusable images, and steps whose loss or gradient is not finite.

1. A sample whose images cannot be read, or have changed since preprocessing, runs with placeholder pixels. It is named,
   gets loss weight 0, and the iteration is rerun, because other ranks already divided by its tokens.
2. If a loss or a gradient is not finite, the microbatches and samples are named and the optimizer skips the step.
   An overflow under a dynamic loss scale skips the step too and lowers the scale; it is reported once at the minimum.

Both are counted, and past a limit the run ends. All ranks decide the same: on (1) over a host process group, as only
hosts know; on (2) by the gradient norm, which Megatron reduces and reads anyway, without another wait for the device.
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
"""Most microbatches named in a line."""


class Hosts:
    """Collectives among all ranks over a host (gloo) process group, without the device."""

    @cached_property
    def group(self) -> dist.ProcessGroup | None:
        """Process group of all ranks; created on first use, which every rank must reach together."""
        return platform.host_group(timedelta(minutes=get_args().distributed_timeout_minutes))

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is set on any rank; collective."""
        together = torch.tensor([float(flag)])
        dist.all_reduce(together, group=self.group)
        return together.item() > 0


@dataclass
class BadSamples:
    """Samples of a dataset whose images cannot be used: they get loss weight 0, and there is a limit to them."""

    data: str
    limit: int
    known: dict[int, str] = field(default_factory=dict)
    """Reason by number of each bad sample; the same on all ranks."""
    found: dict[int, str] = field(default_factory=dict)
    """Reason by number of those that this rank found in this iteration and the others do not know yet."""

    def note(self, batch: Microbatch) -> None:
        """Note the samples of a microbatch whose images are placeholders, unless known, for the next `exchange`."""
        self.found |= {sample: why for sample, why in batch.broken if sample not in self.known}

    def without_known(self, batch: Microbatch) -> Microbatch:
        """Return the microbatch with loss weight 0 for the known bad samples."""
        segments = [number for number, sample in enumerate(batch.sample_ids) if sample in self.known]
        if segments and batch.targets is not None:
            rows = torch.tensor(segments, device=batch.targets.device)
            batch = replace(batch, targets=batch.targets.index_fill(0, rows, 0.0))
        if not segments or batch.loss_mask is None or batch.segment_ids is None:
            return batch
        weights = torch.ones(len(batch.full_pack.lengths))
        weights[segments] = 0.0
        return replace(batch, loss_mask=batch.loss_mask * platform.to_device(weights)[batch.segment_ids])

    def exchange(self) -> None:
        """Make samples that any rank found known to all, and warn of each; collective. Raises UserError for too
        many."""
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
    """Optimizer steps that are skipped because a loss or a gradient was not finite."""

    def __init__(self, limit: int, hosts: Hosts) -> None:
        """Count skipped steps; more than `limit` in a row end the run."""
        self.limit, self.hosts = limit, hosts
        self.in_a_row = self.total = self.iteration = 0
        """`total` includes steps skipped to lower the loss scale, which are normal."""
        self.losses: list[tuple[str, Tensor]] = []
        """(name, loss) of each microbatch. Not the pack, which would keep its pixels in memory."""

    def install(self, on_judged: Callable[[int, bool], None]) -> None:
        """Watch the optimizer that Megatron creates; every step calls `on_judged(iteration, skipped)` on all ranks."""
        make = training.get_megatron_optimizer

        def get_megatron_optimizer(*arguments: Any, **named: Any) -> Any:
            optimizer = make(*arguments, **named)
            self.watch(optimizer, on_judged)
            return optimizer

        training.get_megatron_optimizer = get_megatron_optimizer

    def watch(self, optimizer: Any, on_judged: Callable[[int, bool], None]) -> None:
        """Make an optimizer skip steps that are not finite, as it skips overflows under a loss scale.

        The gradient norm, which it would compute next, is computed once inside `prepare_grads`. An overflow is left to
        the loss scaler unless an unscaled loss was not finite, or the scale is at its minimum.
        """
        prepare, norm, scale = optimizer.prepare_grads, optimizer.get_grad_norm, optimizer.get_loss_scale

        def prepare_grads() -> bool:
            before = scale()
            overflow = prepare()
            if overflow:
                not_finite = self.hosts.any(not all(bool(total.isfinite()) for _, total in self.losses))
            else:
                found = norm()
                optimizer.get_grad_norm = lambda: found
                not_finite = not math.isfinite(found)
            if not_finite:
                self.skip(self._cause(), "lower --lr, or look at these samples")
            elif overflow:
                self._overflowed(before, optimizer.config)
            else:
                self.in_a_row = 0
            on_judged(self.iteration, not_finite)
            return overflow or not_finite

        optimizer.prepare_grads = prepare_grads

    def _overflowed(self, scale: Tensor, config: Any) -> None:
        """Count a step with an overflow; if the loss scale cannot fall further, `skip` reports it."""
        least = config.loss_scale or config.min_loss_scale
        if bool(scale > least):
            self.total += 1
            return
        where = f"gradients overflow under a loss scale of {scale.item():g}, which falls no further"
        self.skip(where, "lower --loss-scale" if config.loss_scale else "lower --min-loss-scale, or --lr")

    def begin_iteration(self, iteration: int) -> None:
        """Set the iteration's number; drop the losses of the one before, or of the first try of this one."""
        self.iteration, self.losses = iteration, []

    def note_loss(self, batch: Microbatch, total: Tensor, normaliser: Tensor) -> Tensor:
        """Note a microbatch's summed loss without waiting for the device; return its normaliser, to divide by.

        It is NaN if the loss is not finite. All ranks divide by the sum of the normalisers, so all gradients are NaN.
        """
        name = f"(pack {batch.pack}, samples {', '.join(map(str, batch.sample_ids))})"
        self.losses.append((name, total.detach()))
        return normaliser + 0 * total.detach()

    def skip(self, where: str, remedy: str) -> None:
        """Count and report a skipped step; collective. Raises UserError past the limit."""
        self.in_a_row += 1
        self.total += 1
        said = f"the step is left out ({self.in_a_row} in a row, {self.total} since the start)"
        print_rank_0(printable(f"warning: iteration {self.iteration}: {where}: {said}"))
        if self.in_a_row > self.limit:
            raise UserError(
                f"iteration {self.iteration}: {where}; {self.in_a_row} steps in a row were not finite, limit "
                f"{self.limit} (--max-bad-steps): {remedy}; the run goes on from its last save"
            )

    def _cause(self) -> str:
        rank = parallel_state.get_data_parallel_rank()
        mine = [
            f"microbatch {number} of data-parallel rank {rank} {name}"
            for number, (name, total) in enumerate(self.losses)
            if parallel_state.get_tensor_model_parallel_rank() == 0 and not bool(torch.isfinite(total))
        ]
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        named = [one for of_rank in everyone for one in of_rank]
        if not named:
            return "gradients are not finite, though all losses are"
        more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
        return f"the loss is not finite in {'; '.join(named[:SHOWN])}{more}"
