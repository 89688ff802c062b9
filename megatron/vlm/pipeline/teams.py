"""Teams: neighbouring data-parallel ranks that run one pack together, where it is wider than a rank.

    data-parallel ranks    0 1 2 3 4 5 6 7
    of width 4             [     ] [     ]     `team_rank` is a rank's number in its team
    of width 2             [ ] [ ] [ ] [ ]

All replicas run the same list of actions, and teams are nested, so exchanges of teams of several widths come in the
same order on all of their ranks and cannot deadlock.
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.parallel_state import create_group
from megatron.training import get_args

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.communicator import all_groups


class Teams:
    """Process groups of the teams of this rank, by their width."""

    def __init__(self) -> None:
        self.groups: dict[int, dist.ProcessGroup] = {}

    def open(self, widths: Iterable[int]) -> None:
        """Create the groups for packs of these widths that are missing. Collective over all ranks of the job."""
        timeout = timedelta(minutes=get_args().distributed_timeout_minutes)
        ranks = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
        for width in sorted({*widths} - {1, *self.groups}):
            teams = [group[at : at + width] for group in all_groups(ranks) for at in range(0, len(group), width)]
            for team in teams:
                group = create_group(list(team), timeout=timeout, group_desc=f"team_of_{width}")
                if dist.get_rank() in team:
                    self.groups[width] = group

    def join(self, batch: Microbatch) -> Microbatch:
        """The same microbatch; the shard of a wide pack with its team."""
        if batch.shard is None:
            return batch
        return replace(batch, shard=replace(batch.shard, team=self.groups[batch.shard.width]))
