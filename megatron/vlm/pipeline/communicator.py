"""How tensors travel between stages: shapes are known on both sides, nothing is exchanged beforehand.

Every pair of neighbours on the ring of pipeline ranks has two channels, activations one way and gradients the other.
Each channel is a process group of its own, so a message waits only for those before it on its own channel and the two
directions can never block each other. All channels are opened at the start, in one order on all ranks: NCCL would open
each at its first message, where the neighbours of a rank disagree on which comes first.
"""

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core.parallel_state import create_group
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.pipeline.progress import Progress


@dataclass
class Receive:
    """A tensor on its way here."""

    tensor: Tensor
    work: dist.Work | None
    message: str = ""
    """What it is, and from whom."""

    def wait(self) -> Tensor:
        """The tensor, arrived."""
        if self.work is not None:
            self.work.wait()
            platform.used_here(self.tensor)
        return self.tensor


class Communicator:
    """Sends and receives of one pipeline rank. Empty tensors (a pack without tiles) are not sent: both sides know."""

    device = "cuda"
    """Where messages start and arrive."""

    def __init__(self, pipeline_group: dist.ProcessGroup, timeout: timedelta | None = None) -> None:
        """All ranks of the job open the channels together. A message that takes longer than `timeout` is an error."""
        ranks = dist.get_process_group_ranks(pipeline_group)
        here = dist.get_rank(pipeline_group)
        self.previous, self.next = ranks[here - 1], ranks[(here + 1) % len(ranks)]
        self.progress = Progress(timeout)
        self.pending: list[tuple[dist.Work | None, Tensor]] = []
        self.channels: dict[tuple[int, str], dist.ProcessGroup] = {}
        for source, target in _all_edges(ranks):
            for kind in ("activation", "gradient"):
                group = create_group(
                    sorted({source, target}),
                    timeout=timeout,
                    pg_options=platform.point_to_point_options(),
                    group_desc=f"pipeline_{kind}",
                )
                if ranks[here] in (source, target):
                    self.channels[source, kind] = group
                    _open(group, self.device, *((source, target) if kind == "activation" else (target, source)))
        self.rank = ranks[here]

    def send_activation(self, tensor: Tensor) -> None:
        """Start sending a stage's output to the next pipeline rank."""
        self._send(tensor, self.next, self.channels.get((self.rank, "activation")))

    def send_gradient(self, tensor: Tensor) -> None:
        """Start sending the gradient of a stage's input to the previous pipeline rank."""
        self._send(tensor, self.previous, self.channels.get((self.previous, "gradient")))

    def receive_activation(self, shape: tuple[int, ...], dtype: torch.dtype) -> Receive:
        """Start receiving a stage's input from the previous pipeline rank."""
        receive = self._receive(shape, dtype, self.previous, self.channels.get((self.previous, "activation")))
        return replace(receive, message=f"its activation from rank {self.previous}")

    def receive_gradient(self, shape: tuple[int, ...], dtype: torch.dtype) -> Receive:
        """Start receiving the gradient of a stage's output from the next pipeline rank."""
        receive = self._receive(shape, dtype, self.next, self.channels.get((self.rank, "gradient")))
        return replace(receive, message=f"its gradient from rank {self.next}")

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self.pending:
            if work is not None:
                work.wait()
        self.pending.clear()

    def _send(self, tensor: Tensor, target: int, channel: dist.ProcessGroup | None) -> None:
        if tensor.numel():
            # A detached alias keeps the memory alive while it travels, even when the output is released.
            tensor = tensor.detach().contiguous()
            self.pending = [(work, kept) for work, kept in self.pending if work is not None and not work.is_completed()]
            self.pending.append((dist.isend(tensor, target, group=channel), tensor))

    def _receive(
        self, shape: tuple[int, ...], dtype: torch.dtype, source: int, channel: dist.ProcessGroup | None
    ) -> Receive:
        with platform.beside_computing("receiving"):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            return Receive(tensor, dist.irecv(tensor, source, group=channel) if tensor.numel() else None)


def _open(channel: dist.ProcessGroup, device: str, source: int, target: int) -> None:
    """Send one number: the connection is made now."""
    number = torch.zeros(1, device=device)
    post = dist.isend if dist.get_rank() == source else dist.irecv
    work = post(number, target if dist.get_rank() == source else source, group=channel)
    assert work is not None
    work.wait()


def _all_edges(ranks: list[int]) -> list[tuple[int, int]]:
    """(source, target) of the rings of all pipelines, in one order on all ranks: making a group takes everyone."""
    everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, ranks)
    pipelines = sorted({tuple(pipeline) for pipeline in everyone if len(pipeline) > 1})
    return [edge for pipeline in pipelines for edge in zip(pipeline, (*pipeline[1:], pipeline[0]), strict=True)]
