"""All buckets of a stage have one order, whichever ranks share them and whatever a pack makes a rank touch first."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megatron.vlm.pipeline.data_parallel import Gathers, OrderedReductions


class Group:
    def __init__(self, name: str, weights: list[torch.nn.Parameter], started: list[str]) -> None:
        self.buckets = [SimpleNamespace(params_list=weights)]
        self.start_grad_sync = lambda: started.append(name)


class Stage(torch.nn.Module):
    """Two layers, each with a bucket for its experts and one for all else, as core wraps it."""

    def __init__(self, started: list[str]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(1)) for _ in range(4))
        norm0, expert0, norm1, expert1 = self.weights
        self.bucket_groups = [Group("norm1", [norm1], started), Group("norm0", [norm0], started)]
        self.expert_parallel_bucket_groups = [
            Group("expert1", [expert1], started),
            Group("expert0", [expert0], started),
        ]


def test_reductions_of_experts_have_their_turns_among_the_others() -> None:
    """In backward order, however they become ready; core, which asks each in turn, finds them in it."""
    wanted = ["expert1", "norm1", "expert0", "norm0"]
    for ready in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        started: list[str] = []
        stage, order = Stage(started), OrderedReductions()
        order.attach(stage)
        groups = [*stage.bucket_groups, *stage.expert_parallel_bucket_groups]
        for times, places in ((1, ready), (2, range(4))):
            for place in places:
                groups[place].start_grad_sync()
            assert started == times * wanted


class Bucket:
    """A bucket group whose weights are gathered; notes what is asked of it."""

    def __init__(self, name: str, noted: list[str]) -> None:
        self.name, self.noted, self.under_way = name, noted, False

    def start_param_sync(self) -> None:
        assert not self.under_way
        self.under_way = True
        self.noted.append(f"start {self.name}")

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        assert skip_next_bucket_dispatch, "core would start another"
        if self.under_way:  # each layer asks, core waits once
            self.noted.append(f"wait {self.name}")
        self.under_way = False


class Wrapped:
    """A stage of two layers, a bucket each, as core wraps it: in backward order."""

    def __init__(self, backwards: str, noted: list[str]) -> None:
        self.bucket_groups = [Bucket(name, noted) for name in backwards]


class Rank:
    def __init__(self) -> None:
        self.noted: list[str] = []
        self.stages = [Wrapped("ba", self.noted), Wrapped("dc", self.noted)]
        self.buckets = {bucket.name: bucket for stage in self.stages for bucket in stage.bucket_groups}

    @contextlib.contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        assert message == "weights from its data-parallel ranks"
        yield

    def gather(self) -> Gathers:
        return Gathers(self.stages, self.waiting)

    def touch(self, names: str) -> None:
        """Run layers: core asks for the weights of each, at its bucket."""
        for name in names:
            self.buckets[name].finish_param_sync(skip_next_bucket_dispatch=True)
            self.noted.append(f"run {name}")


def test_computing_begins_behind_the_first_gather_and_each_goes_on_beside_the_layers_before_it() -> None:
    rank = Rank()
    rank.gather()
    rank.touch("abcd")
    assert rank.noted == [
        "start a", "wait a", "start b", "run a", "wait b", "start c", "run b", "wait c", "start d", "run c", "wait d",
        "run d",
    ]  # fmt: skip


@pytest.mark.parametrize("first", ["", "b", "ba"])
@pytest.mark.parametrize("second", ["", "dc", "d"])
def test_gathers_start_in_one_order_and_in_the_stage_that_needs_them(first: str, second: str) -> None:
    """Whatever a pack touches, in whatever order: with the first stage all of its have come, and one more is asked."""
    rank = Rank()
    for _ in range(2):  # iterations
        rank.noted.clear()
        gathers = rank.gather()
        for stage, touched in zip(rank.stages, (first, second), strict=True):
            rank.touch(touched)
            gathers.finish(stage)
            exchanged = [what for what in rank.noted if not what.startswith("run")]
            in_order = ["start a", "wait a", "start b", "wait b", "start c", "wait c", "start d", "wait d"]
            assert exchanged == in_order[: 5 if stage is rank.stages[0] else 8]
        rank.touch("abcd")  # the next microbatch
        assert rank.noted[-4:] == ["run a", "run b", "run c", "run d"]


def test_where_nothing_is_gathered_nothing_is_waited_for() -> None:
    rank = Rank()
    gathers = Gathers([], rank.waiting)
    gathers.finish(rank.stages[0])
    rank.touch("a")
    assert rank.noted == ["run a"]
