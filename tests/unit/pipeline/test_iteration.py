"""An iteration on a rank of three, its neighbours and its device stood for: what leaves when, and where it stands."""

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.model_parallel_config import ModelParallelConfig
from torch import Tensor

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline.communicator import Communicator, Receive, Send
from megatron.vlm.pipeline.iteration import Chunk, Iteration
from megatron.vlm.pipeline.progress import Progress
from megatron.vlm.pipeline.weight_gradients import WeightGradients
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import with_posts
from omnibal_ext.schedules.schedule import build_schedule
from tests.distributed import harness
from tests.unit.pipeline.test_data_parallel import Bucket
from tests.unit.test_progress import Device

RANKS, MICROBATCHES = 3, 4
FIRST, MIDDLE = 0, 1
PLACEMENT = Placement.interleaved(RANKS)


class Done:
    """A message for which, as on a GPU, no host waits."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return False


class Neighbours(Communicator):
    device = "cpu"

    def __init__(self, here: int) -> None:
        self.ranks, self.here, self.progress, self.pending = [10, 11, 12], here, Progress(None), []
        self.names = [f"rank {rank} on node-{rank}" for rank in range(13)]
        self.channels = {
            (source, target, kind): object()
            for source in range(RANKS) for target in range(RANKS) for kind in ("activation", "gradient")
        }  # fmt: skip

    @property
    def sent(self) -> list[str]:
        return [send.message for send in self.pending]

    def _send(self, tensor: Tensor, target: int, channel: Any) -> None:
        self.pending.append(Send(tensor, Done()))  # type: ignore[arg-type]

    def finish(self) -> None:
        sent = self.pending.copy()
        super().finish()
        self.pending = sent

    def _receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, channel: Any) -> Receive:
        return Receive(torch.ones(shape, dtype=dtype), Done())  # type: ignore[arg-type]


def run(communicator: Neighbours, packs: Iterator[Microbatch], buckets: Sequence[Any] = ()) -> None:
    """1F1B of four packs on a stage that doubles what it gets, and asks for none of its weights."""
    gathers = (lambda: None) if buckets else None
    config = ModelParallelConfig(pipeline_dtype=torch.float32, param_sync_func=gathers)
    module = torch.nn.Module()
    module.bucket_groups = buckets  # type: ignore[assignment]
    chunk = Chunk(module, packs, config)
    first = communicator.here == FIRST
    vars(chunk)["stage"] = SimpleNamespace(
        post_process=False, has_backward=True, receives_gradient=True, sends_gradient=not first,
        input_shape=lambda pack: (pack.tokens,), gathers_first=lambda pack: pack.media_of("tiles").amount == 0,
    )  # fmt: skip

    def forward(_: Chunk, pack: Microbatch, entering: Tensor | None, __: int) -> tuple[Tensor, Tensor]:
        assert (entering is None) == first
        entering = torch.ones(pack.tokens, requires_grad=True) if entering is None else entering
        return 2 * entering, torch.zeros(())

    steps = with_posts(build_schedule("1f1b", RANKS, MICROBATCHES), MICROBATCHES, PLACEMENT)[communicator.here]
    watch = lambda _: contextlib.nullcontext()  # noqa: E731
    Iteration(communicator, PLACEMENT, [chunk], forward, WeightGradients(), watch).run(steps)


def test_an_output_has_left_before_the_next_pack_is_waited_for() -> None:
    """A loader that is late keeps no later stage waiting."""
    communicator = Neighbours(FIRST)
    when: list[int] = []

    def late() -> Iterator[Microbatch]:
        for pack in harness.sample_packs()[:MICROBATCHES]:
            when.append(len(communicator.sent))
            yield pack

    run(communicator, late())
    assert communicator.sent == ["its activation to reach rank 11 on node-11"] * MICROBATCHES
    assert when == [0, 1, 2, 3]


def test_weights_that_no_pack_needed_are_gathered_all_the_same() -> None:
    """Once an iteration, in one order on all replicas: what is still under way at its end meets the next one's."""
    log: list[str] = []
    packs = [pack for pack in harness.sample_packs() if pack.media_of("tiles").amount]
    run(Neighbours(FIRST), iter((packs * MICROBATCHES)[:MICROBATCHES]), [Bucket("b", log), Bucket("a", log)])
    assert log == ["start a", "wait a", "start b", "wait b"]


def places() -> list[str]:
    """Where the middle rank stands one after the other, written down by hand for 1F1B: F F B F B F B B."""
    names = {
        "F": ("the forward", "its activation from rank 10 on node-10"),
        "B": ("the backward", "its gradient from rank 12 on node-12"),
    }
    found = []
    for action, microbatch in (("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("F", 3), ("B", 2), ("B", 3)):
        doing = f"{names[action][0]} of microbatch {microbatch}, chunk 0"
        found += [doing, f"{doing}, waiting for {names[action][1]}", doing]
    after = "the sends after the last action"
    found.append(after)
    for kind in "AAGAGAGG":
        sent = (
            "its activation to reach rank 12 on node-12" if kind == "A" else "its gradient to reach rank 10 on node-10"
        )
        found += [f"{after}, waiting for {sent}", after]
    return found


def test_the_place_is_the_first_that_the_device_has_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has run past the schedule; the device is stuck in each action and each message in turn."""
    device = Device(monkeypatch)
    communicator = Neighbours(MIDDLE)
    run(communicator, iter(harness.sample_packs()[:MICROBATCHES]))
    wanted = places()
    assert device.asked == len(wanted)
    for reached, doing in enumerate([*wanted, "what follows the schedule"]):
        device.reached = reached
        step = communicator.progress.step()
        assert step is not None
        assert step.doing.startswith(doing)
        assert reached == len(wanted) or step.doing == doing
