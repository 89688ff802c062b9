"""Channels between pipeline neighbours are made at the start: all by all ranks in one order, each opened by its two."""

from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron.vlm import platform
from megatron.vlm.pipeline import communicator
from megatron.vlm.pipeline.communicator import Communicator
from omnibal_ext.schedules.placement import Placement


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("edges", [Placement.interleaved(3, 2).edges, Placement.v_shaped(3, 2).edges])
def test_every_channel_is_made_by_all_and_opened_by_its_two(
    edges: tuple[tuple[int, int], ...], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the options of messages between neighbours, and a limit of time."""
    made: list[tuple[list[int], str]] = []
    opened: list[tuple[int, int]] = []

    def create_group(ranks: list[int], *, timeout: timedelta, pg_options: object, group_desc: str) -> object:
        assert (timeout, pg_options) == (timedelta(minutes=2), "options")
        made.append((ranks, group_desc))
        return len(made)

    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda _: [0, 1, 2])
    monkeypatch.setattr(torch.distributed, "get_rank", lambda _=None: rank)
    monkeypatch.setattr(communicator, "all_groups", lambda ranks: [(0, 1, 2)])
    monkeypatch.setattr(platform, "point_to_point_options", lambda: "options")
    monkeypatch.setattr(communicator, "names_of_ranks", lambda: ["rank 0 on a", "rank 1 on a", "rank 2 on b"])
    monkeypatch.setattr(communicator, "create_group", create_group)
    monkeypatch.setattr(communicator, "_open", lambda group, device, *ends: opened.append(ends))
    found = Communicator(object(), edges, timedelta(minutes=2))  # type: ignore[arg-type]
    pairs = [(sorted(edge), f"pipeline_{kind}") for edge in edges for kind in ("activation", "gradient")]
    assert made == pairs
    both_ways = [ends for edge in edges for ends in (edge, edge[::-1])]
    assert opened == [ends for ends in both_ways if rank in ends]
    assert len(set(found.channels.values())) == len(opened)


class Options:
    """NCCL's, of which this torch may know nothing."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self.config = is_high_priority_stream, type("Config", (), {})()


@pytest.mark.parametrize(
    ("cuda", "backend", "wanted"), [(True, "nccl", True), (True, "gloo", False), (False, "gloo", False)]
)
def test_messages_go_before_computing_and_leave_it_the_device(
    cuda: bool, backend: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nccl: Any = type("ProcessGroupNCCL", (), {"Options": Options})
    monkeypatch.setattr(platform, "HAS_CUDA", cuda)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", nccl, raising=False)
    options = platform.point_to_point_options()
    assert (options is not None) == wanted
    assert not wanted or (options.is_high_priority_stream and options.config.max_ctas == 8)
