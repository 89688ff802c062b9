"""Messages between stages. Shapes are known on both sides, and not exchanged beforehand.

Wherever the placement has activations travel from one rank to another there are two channels: activations go one way,
gradients the other. (Two ranks of a V have four: there activations go both ways.) Each channel is a process group of
its own, so a message waits only for those before it on its own channel, and they are taken in the order in which they
were sent (`omnibal_ext.schedules.program`): ranks are free in all else. All channels are opened at the start, in one
order on all ranks: NCCL would open each at its first message, where the neighbours of a rank disagree on which comes
first.

Teams are neighbouring data-parallel ranks that run one pack together, where it is wider than a rank:

    data-parallel ranks    0 1 2 3 4 5 6 7
    of width 4             [     ] [     ]     `team_rank` is a rank's number in its team
    of width 2             [ ] [ ] [ ] [ ]

All replicas run the same list of actions, and teams are nested, so exchanges of teams of several widths come in the
same order on all of their ranks and cannot deadlock.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.parallel_state import create_group
from megatron.training import get_args
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.progress import Progress, name_of_rank

ACTIVATION, GRADIENT = "activation", "gradient"
"""A stage's output, for the next one; the gradient of its input, for the one before."""
IMAGE_TOKENS, IMAGE_GRADIENT = "image tokens", "gradient of image tokens"
"""The output of a replicated tower, for the first stage; its gradient, for the rank that encoded the images."""


@dataclass
class Receive:
    """A tensor that another rank sends, on its way here; `work` is None for one that is here already."""

    tensor: Tensor
    work: dist.Work | None
    message: str = ""
    """What the tensor is, and from whom."""

    def wait(self) -> Tensor:
        """Wait until the tensor has arrived; return it."""
        if self.work is not None:
            self.work.wait()
            platform.used_here(self.tensor)
        return self.tensor


@dataclass
class Send:
    """A tensor on its way to another rank; its memory is kept until it has left."""

    tensor: Tensor
    work: dist.Work | None
    message: str = ""
    """What the tensor is, and to whom."""

    @property
    def has_left(self) -> bool:
        """Whether it has been sent; does not wait."""
        return self.work is None or self.work.is_completed()


class Communicator:
    """Sends and receives of one pipeline rank. Empty tensors (a pack without tiles) are not sent: both sides know."""

    device = "cuda"
    """Device on which messages start and arrive."""

    def __init__(
        self,
        pipeline_group: dist.ProcessGroup,
        edges: Sequence[tuple[int, int]],
        timeout: timedelta | None = None,
        image_edges: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Open the channels; collective over the job. `edges`: (source, target) pairs of pipeline ranks along which
        activations travel, and against which gradients do; `image_edges`: the same for image tokens of a replicated
        tower. A message that takes longer than `timeout` is an error.

        All ranks make the groups of all channels, though each uses its own alone, since torch names groups by their
        number. (With `use_local_synchronization` it numbers the groups that a rank has, of which the two ends of a
        channel have different numbers: they would wait for each other for ever.)
        """
        self.ranks = dist.get_process_group_ranks(pipeline_group)
        self.here = dist.get_rank(pipeline_group)
        self.progress = Progress(timeout)
        self.names = names_of_ranks()
        """Name of each rank of the job: "rank 3 on HOST"."""
        self.pending: list[Send] = []
        self.channels: dict[tuple[int, int, str], dist.ProcessGroup] = {}
        """Process groups by source and target among this pipeline's ranks, and by what travels."""
        for pipeline in (group for group in all_groups(self.ranks) if len(group) > 1):
            for source, target in edges:
                self._make(pipeline, source, target, ACTIVATION, timeout)
                self._make(pipeline, target, source, GRADIENT, timeout)
            for source, target in image_edges:
                self._make(pipeline, source, target, IMAGE_TOKENS, timeout)
                self._make(pipeline, target, source, IMAGE_GRADIENT, timeout)

    def _make(self, pipeline: Sequence[int], source: int, target: int, kind: str, timeout: timedelta | None) -> None:
        """Make one channel's process group, collective over the job; connect it if this rank is one of its ends."""
        ends = pipeline[source], pipeline[target]
        options = platform.point_to_point_options()
        group = create_group(
            sorted(ends), timeout=timeout, pg_options=options, group_desc=f"pipeline_{kind.replace(' ', '_')}"
        )
        if self.ranks[self.here] in ends:
            self.channels[source, target, kind] = group
            _open(group, self.device, *ends)

    def send(self, what: str, tensor: Tensor, target: int) -> None:
        """Start sending a tensor to pipeline rank `target`; `what` it is (`ACTIVATION`, ...) names the channel."""
        self._send(tensor, self.ranks[target], self.channels[self.here, target, what])
        if tensor.numel():
            self.pending[-1].message = f"its {what} to reach {self.names[self.ranks[target]]}"

    def receive(self, what: str, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> Receive:
        """Start receiving a tensor from pipeline rank `source`; `what` it is (`ACTIVATION`, ...) names the channel."""
        receive = self._receive(shape, dtype, self.ranks[source], self.channels[source, self.here, what])
        return replace(receive, message=f"its {what} from {self.names[self.ranks[source]]}")

    def finish(self) -> None:
        """Wait until everything sent has left."""
        for send in self.pending:
            if send.work is not None:
                with self.progress.waiting(send.message):
                    send.work.wait()
        self.pending.clear()

    def _send(self, tensor: Tensor, target: int, channel: dist.ProcessGroup) -> None:
        if tensor.numel():
            # A detached alias keeps the memory alive while it travels, even when the output is released.
            tensor = tensor.detach().contiguous()
            self.pending = [send for send in self.pending if not send.has_left]
            self.pending.append(Send(tensor, dist.isend(tensor, target, group=channel)))

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, channel: dist.ProcessGroup) -> Receive:
        with platform.beside_computing("receiving"):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
            return Receive(tensor, dist.irecv(tensor, source, group=channel) if tensor.numel() else None)


def _open(channel: dist.ProcessGroup, device: str, source: int, target: int) -> None:
    """Send a number from `source` to `target`, ranks of the job, so that the two connect now; both call it."""
    number = torch.zeros(1, device=device)
    post = dist.isend if dist.get_rank() == source else dist.irecv
    work = post(number, target if dist.get_rank() == source else source, group=channel)
    assert work is not None
    work.wait()


def names_of_ranks() -> list[str]:
    """Return "rank 3 on HOST" of every rank of the job, in order, for warnings; collective over the job."""
    names = [""] * dist.get_world_size()
    dist.all_gather_object(names, name_of_rank(dist.get_rank()))
    return names


def all_groups(ranks: list[int]) -> list[tuple[int, ...]]:
    """Return the different groups that the job's ranks pass in, sorted and the same on all. Collective over the job."""
    everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, ranks)
    return sorted(set(map(tuple, everyone)))


class Teams:
    """Process groups of the ranks with which this one runs wide packs together (teams), by their number (width)."""

    def __init__(self) -> None:
        self.groups: dict[int, dist.ProcessGroup] = {}

    def open(self, widths: Iterable[int]) -> None:
        """Create the missing groups for packs that so many ranks (`widths`) run together. Collective over the job."""
        timeout = timedelta(minutes=get_args().distributed_timeout_minutes)
        ranks = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
        for width in sorted({*widths} - {1, *self.groups}):
            teams = [group[at : at + width] for group in all_groups(ranks) for at in range(0, len(group), width)]
            for team in teams:
                group = create_group(list(team), timeout=timeout, group_desc=f"team_of_{width}")
                if dist.get_rank() in team:
                    self.groups[width] = group

    def join(self, batch: Microbatch) -> Microbatch:
        """Return the microbatch; if it is a shard of a wide pack, with the process group of its team."""
        if batch.shard is None:
            return batch
        return replace(batch, shard=replace(batch.shard, team=self.groups[batch.shard.width]))
