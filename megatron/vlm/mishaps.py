"""What goes wrong inside an iteration, found by all ranks together so that they stay in step.

1. A sample whose images cannot be read any more has stand-ins of their shape: it is named, weighs nothing in the loss
   from then on, and the iteration is run again, as the ranks that weigh did not know.
2. A loss or a gradient that is not finite: microbatches and samples are named, and the optimizer leaves the step out.

Both are counted, and end the run past a limit. An iteration costs one number more to be summed over the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import print_rank_0, training
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.microbatch import Microbatch
from omnibal_ext.errors import UserError

SHOWN = 4
"""Microbatches named in a line."""


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
        if not segments or batch.loss_mask is None or batch.segment_ids is None:
            return batch
        silent = torch.isin(batch.segment_ids, torch.tensor(segments, device=batch.segment_ids.device))
        return replace(batch, loss_mask=batch.loss_mask.masked_fill(silent, 0.0))

    def share(self) -> None:
        """Let all ranks know what any has found; every rank calls it. Raises UserError past the limit."""
        everyone: list[dict[int, str]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, self.found)
        new = {sample: why for found in everyone for sample, why in found.items() if sample not in self.known}
        self.known |= new
        self.found = {}
        for _, why in sorted(new.items()):
            print_rank_0(
                f"warning: {why}: it weighs nothing from now on ({len(self.known)} of {self.limit} such samples)"
            )
        if len(self.known) > self.limit:
            raise UserError(
                f"{len(self.known)} samples of {self.data} have images that cannot be read, limit {self.limit}: "
                f"{new[min(new)]}; see to the images, or raise --max-bad-samples"
            )


class BadSteps:
    """Steps that are left out because a loss or a gradient was not finite."""

    def __init__(self, limit: int, scaled: bool) -> None:
        """limit: so many in a row are left out, one more ends the run. scaled: the loss scaler looks at gradients."""
        self.limit, self.scaled = limit, scaled
        self.in_a_row = self.total = 0
        self.skip = False
        """Whether the optimizer is to leave out the step of this iteration."""
        self.losses: list[tuple[Microbatch, Tensor]] = []

    def install(self) -> None:
        """Let the optimizer that Megatron makes leave such steps out, as it does those of which gradients overflow."""
        make = training.get_megatron_optimizer

        def get_megatron_optimizer(*arguments: Any, **named: Any) -> Any:
            optimizer = make(*arguments, **named)
            prepare = optimizer.prepare_grads
            optimizer.prepare_grads = lambda: prepare() or self.skip
            return optimizer

        training.get_megatron_optimizer = get_megatron_optimizer

    def begin(self) -> None:
        """Forget the iteration before, or the first try of this one."""
        self.losses, self.skip = [], False

    def saw(self, batch: Microbatch, total: Tensor) -> None:
        """Note the loss of a microbatch; waits for nothing."""
        self.losses.append((batch, total.detach()))

    def unsound(self, modules: Sequence[Any]) -> Tensor:
        """1 where a loss or gradient of this rank is not finite, else 0, on the device; fp32 [1]."""
        values = [total.reshape(1).float() for _, total in self.losses]
        if not self.scaled:
            for module in modules:
                for buffer in (*module.buffers, *module.expert_parallel_buffers):
                    values += [extreme.reshape(1).float() for extreme in torch.aminmax(buffer.grad_data)]
        if not values:
            return torch.zeros(1, device="cuda")
        return (~torch.isfinite(torch.cat(values))).any().float().reshape(1)

    def settle(self, unsound: bool, iteration: int) -> None:
        """Count and name a step that is to be left out; every rank calls it. Raises UserError past the limit."""
        self.skip = unsound
        if not unsound:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self.total += 1
        where = self._where()
        print_rank_0(
            f"warning: iteration {iteration}: {where}: the step is left out ({self.in_a_row} in a row, "
            f"{self.total} since the start)"
        )
        if self.in_a_row > self.limit:
            raise UserError(
                f"iteration {iteration}: {where}; {self.in_a_row} steps in a row were not finite, limit {self.limit} "
                "(--max-bad-steps): lower --lr, or look at these samples; the run goes on from its last save"
            )

    def _where(self) -> str:
        rank = parallel_state.get_data_parallel_rank()
        mine = [
            f"microbatch {number} of data-parallel rank {rank} (pack {batch.pack}, samples "
            f"{', '.join(map(str, batch.sample_ids))})"
            for number, (batch, total) in enumerate(self.losses)
            if parallel_state.get_tensor_model_parallel_rank() == 0 and not bool(torch.isfinite(total))
        ]
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        named = [one for rank_s in everyone for one in rank_s]
        if not named:
            return "gradients are not finite, though all losses are"
        more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
        return f"the loss is not finite in {'; '.join(named[:SHOWN])}{more}"


def anywhere(*flags: Tensor) -> list[bool]:
    """Whether each flag [1] is above 0 on any rank; every rank calls it, and waits for its device."""
    together = torch.cat([platform.to_device(flag) for flag in flags])
    dist.all_reduce(together)
    return [value > 0 for value in together.tolist()]
