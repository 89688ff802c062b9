"""Packs arrive in time and whole: none read twice or too early, the host waits for no copy, bytes become pixels."""

import contextlib
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.data.arrival import Arrivals, to_device
from megatron.vlm.data.media.videos import join_tiles
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.pipeline import encoding
from omnibal_ext.modalities.vision.normalization import NORMALIZATIONS
from tests.distributed import harness
from tests.media import seen, with_images
from tests.unit.alone import megatron_alone


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    with megatron_alone("small"):
        yield


def as_loaded(pack: Microbatch, seed: int) -> Microbatch:
    """The same pack with bytes for pixels, as the loader gives them."""
    shape = (seen(pack).amount, 16, 16, 3)
    drawn = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return with_images(pack, values=drawn, statistics=NORMALIZATIONS["clip"])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("number", range(len(harness.PACK_KINDS["all"])))
def test_bytes_become_the_pixels_that_the_vision_model_was_trained_with(number: int) -> None:
    host = as_loaded(harness.sample_packs()[number], seed=number)
    (pack,) = Arrivals(iter([host]), 1)
    mean, deviation = (np.array(values)[:, None, None] for values in NORMALIZATIONS["clip"])
    expected = [(tile.transpose(2, 0, 1) / 255 - mean) / deviation for tile in seen(host).values.numpy()]
    assert seen(pack).values.shape == (seen(host).amount, 3, 16, 16)
    np.testing.assert_allclose(seen(pack).values.numpy(), np.reshape(expected, seen(pack).values.shape), atol=1e-6)
    assert seen(pack).statistics is None
    for holders, others in (((pack, host), ["media"]), ((seen(pack), seen(host)), ["values", "statistics"])):
        for field in fields(holders[0]):
            if field.name not in others:
                assert getattr(holders[0], field.name) is getattr(holders[1], field.name)


def test_an_iteration_reads_its_packs_one_ahead_and_none_of_the_next() -> None:
    read: list[int] = []

    def source() -> Iterator[Microbatch]:
        for number, pack in enumerate(harness.sample_packs()):
            read.append(number)
            yield pack

    packs = source()
    for arrivals, begin, count in ((Arrivals(packs, 3), 0, 3), (Arrivals(packs, 4), 3, 4)):
        for number, pack in enumerate(arrivals, start=begin):
            assert list(pack.lengths) == harness.PACK_KINDS["all"][number][1]
            assert read[-1] == number
            arrivals.look_ahead()
            arrivals.look_ahead()  # one ahead is enough, also after the last
            assert read[-1] == min(number + 1, begin + count - 1)


class Device:
    """Stands for a GPU: writes down, in order, what is pinned, copied, waited for and kept, and on which stream."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.stream = "computing"
        self.pinned: list[Tensor] = []
        patch.setattr(platform, "HAS_CUDA", True)
        patch.setattr(platform, "_stream", lambda purpose: purpose)
        patch.setattr(torch.cuda, "stream", self.on)
        waits = SimpleNamespace(wait_stream=lambda stream: self.events.append(f"{self.stream} waits for {stream}"))
        patch.setattr(torch.cuda, "current_stream", lambda: waits)
        to = Tensor.to
        patch.setattr(Tensor, "pin_memory", lambda tensor, *_: self.pin(tensor))
        patch.setattr(Tensor, "to", lambda *args, **how: (self.copy if "cuda" in args else to)(*args, **how))
        patch.setattr(Tensor, "record_stream", lambda *_: self.events.append(f"kept by {self.stream}"))

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned.append(tensor.clone())
        return self.pinned[-1]

    def copy(self, tensor: Tensor, _: str, non_blocking: bool = False) -> Tensor:
        pinned = any(tensor is one for one in self.pinned)
        how = f"{'pinned' if pinned else 'pageable'}, {'not ' * (not non_blocking)}beside"
        self.events.append(f"copied on {self.stream}: {how}")
        return tensor.clone()


@pytest.mark.usefixtures("alone")
def test_the_host_waits_for_no_copy_and_the_device_for_those_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    host = as_loaded(harness.sample_packs()[0], seed=0)
    tensors = sum(isinstance(value, Tensor) for one in (host, seen(host)) for value in vars(one).values())
    device = Device(monkeypatch)
    pinned = host.pin_memory()  # as torch's DataLoader does
    pack = next(Arrivals(iter([pinned]), 1))
    arrived = list(device.events)
    device.events.clear()
    assert pack.segments.cu_seqlens_q.tolist() == [0, 9]
    assert pack.positions.tolist() == list(range(9))
    small = list(device.events)
    assert len(device.pinned) == tensors + 2
    copied = ["copied on copying: pinned, beside"] * tensors
    assert arrived == [*copied, "computing waits for copying", *["kept by computing"] * tensors]
    assert small == ["copied on computing: pinned, beside"] * 2


def test_what_another_rank_brings_is_neither_copied_nor_pinned() -> None:
    shape = torch.empty(2, 16, 16, 3, dtype=torch.uint8, device="meta")
    host = with_images(harness.sample_packs()[0], values=shape)
    assert seen(to_device(host)).values is shape


def test_tiles_lie_row_by_row_so_that_a_broadcast_sends_them_in_order() -> None:
    """Those of one image are cut as a view with other strides, which concatenating alone keeps."""
    turned = np.arange(2 * 3 * 4 * 3, dtype=np.uint8).reshape(3, 4, 3, 2).transpose(3, 0, 1, 2)
    assert not turned.flags.c_contiguous
    for parts in ([turned], [turned, turned]):
        joined = join_tiles(parts)
        assert joined.flags.c_contiguous
        assert np.array_equal(joined, np.concatenate(parts))


@pytest.mark.parametrize("mode", ["with", "ahead"])
def test_who_encodes_the_first_pack_alone_reads_all_of_an_iteration(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the next iteration would begin with packs of this one."""
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    monkeypatch.setattr(encoding.parallel_state, "get_tensor_model_parallel_group", lambda: group)
    tower: Any = SimpleNamespace(
        plan=SimpleNamespace(encoding_ranks=((1,), (0,), (0,), (0,)), mode=mode, again=False, rates={}),
        chain=SimpleNamespace(architecture=SimpleNamespace(encoders=())),
        trained=False, refresh=lambda: None,
    )  # fmt: skip
    made, read = encoding.Encoding(tower, SimpleNamespace(here=1), first=0), []  # type: ignore[arg-type]

    def packs() -> Iterator[Microbatch]:
        for number in range(16):
            read.append(number)
            yield Microbatch(lengths=(4,), samples=1, useful_tokens=0, pack=number)

    source = packs()
    for iteration in range(3):
        made.take(encoding.ToEncode(source, iteration), 4, training=True)
        if made.begin():
            made.encode(0, contextlib.nullcontext)
        made.go_on()
        made.encode(0, contextlib.nullcontext)
        made.end()
        assert len(read) == 4 * (iteration + 1 + (mode == "ahead"))
