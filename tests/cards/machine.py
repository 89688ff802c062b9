"""The machine: what of torch is replaced, and why. Nothing of Megatron's is, and nothing of ours.

`install` comes before anything asks torch for CUDA, `power_on` in each process, before its program.
"""

import os
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import reduce
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.attention.varlen
from cards.modes import Calls, Kernels, tensors_in, waits_for
from cards.places import Cards
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _disable_current_modes

MEMORY = 80 * 2**30
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132
)
cards = Cards(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
"""Of this process; made anew by `power_on`."""


class Event:
    """A point in what the card does, which does all at once: only whether the host waits for it is of interest."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.seconds, self.number = time.perf_counter(), 0

    def record(self, *_: Any) -> None:
        self.device = torch.device("cuda", cards.here())
        cards.asked += 1
        self.seconds, self.number = time.perf_counter(), cards.asked

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self.number > cards.reached:
            waits_for(cards, "an event")

    def elapsed_time(self, later: "Event") -> float:
        return (later.seconds - self.seconds) * 1e3


class Stream:
    """In the order in which the host asks."""

    cuda_stream = 0

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None:
        waits_for(cards, "a stream")

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event


class NewStream(Stream):
    """One more, of this process's card."""

    def __init__(self, *_: Any, **__: Any) -> None:
        cards.here()


def calls() -> Calls:
    """The mode of this process."""
    assert _calls is not None
    return _calls


_calls: Calls | None = None
_kernels: Kernels | None = None


def set_device(device: Any) -> None:
    """As torch's: from here on this process has a card."""
    number = device if isinstance(device, int) else torch.device(device).index
    if number is None or number >= cards.count:
        raise RuntimeError(f"there is no card {device}: {cards.count} in all")
    cards.current = number


def compiled(function: Any = None, **_: Any) -> Any:
    return (lambda one: one) if function is None else function


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, _: Tensor, most: int, __: int, *,
    scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Attention inside each segment: [T, heads, width]; torch's signature."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("the kernel takes half precision alone")
    with torch._C.DisableTorchFunction():
        lengths = starts.diff().tolist()
    assert max(lengths, default=0) <= most
    parts = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
    causal = window_size == (-1, 0)
    return torch.cat([_one(*part, causal, scale, enable_gqa) for part in parts])


def _one(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, grouped: bool) -> Tensor:
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    return out.squeeze(0).transpose(0, 1)


def within_modes(*arguments: Any, **how: Any) -> Any:
    """A backward pass that asks and computes as a forward pass does."""
    with calls():
        return _run_backward(*arguments, **how)


_run_backward = torch.autograd._engine_run_backward


def wait_for_work(work: Any, *timeout: Any) -> bool:
    """As torch's, unseen."""
    with _disable_current_modes():
        done: bool = _wait(work, *timeout)
    return done


_wait = torch.distributed.Work.wait


def where_the_model_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of DDP's parts in C++: the buffers that they make are on the card of the parameters that they are given."""

    def call(*arguments: Any, **how: Any) -> Any:
        assert _kernels is not None
        _kernels.making = cards.number(next(tensors_in(arguments)).device)
        try:
            return function(*arguments, **how)
        finally:
            _kernels.making = None

    return call


class Autocast(torch.autocast):
    """Of the CPU's operations, which compute for cards too."""

    def __init__(self, device_type: str, *arguments: Any, **how: Any) -> None:
        super().__init__("cpu" if device_type == "cuda" else device_type, *arguments, **how)


def _of_cards(function: Callable[..., Any]) -> Callable[..., Any]:
    """What torch says of a kind of device, asked of the one whose operations compute."""
    return lambda kind="cuda", *more: function("cpu" if kind == "cuda" else kind, *more)


class Backends:
    """Process groups by the backend that was asked for: where it is NCCL, gloo carries what NCCL would take."""

    def __init__(self) -> None:
        self.init, self.new = torch.distributed.init_process_group, torch.distributed.new_group
        self.names: dict[str, str] = {}
        self.asked: list[str] = []
        """Of the group of all ranks, and the device that it is bound to."""

    def init_process_group(self, backend: str | None = None, *args: Any, device_id: Any = None, **how: Any) -> None:
        self.init("gloo", *args, **how)
        self.asked = [str(backend), str(device_id)]
        self.names = {torch.distributed.group.WORLD.group_name: backend or "nccl"}

    def new_group(self, ranks: Any = None, timeout: Any = None, backend: str | None = None, pg_options: Any = None,
                  **how: Any) -> Any:  # fmt: skip
        group = self.new(ranks, timeout, "gloo", None, **how)
        if isinstance(group, ProcessGroup):
            self.names[group.group_name] = backend or self.of(None)
        return group

    def of(self, group: Any = None) -> str:
        """The backend's name; "" of a group that was not asked for here."""
        group = torch.distributed.group.WORLD if group is None else group
        return self.names.get(group.group_name, "")

    def device_of(self, group: Any = None) -> str:
        """Where tensors of a group's messages are."""
        return "cuda" if self.of(group) == "nccl" else "cpu"

    def of_boxed(self, group: Any) -> str:
        """The same of a group as operations have it."""
        try:
            return self.of(ProcessGroup.unbox(group))
        except RuntimeError:  # not a group
            return ""


backends = Backends()


@contextmanager
def _on(device: Any) -> Any:
    before, number = cards.current, cards.number(device)
    cards.current = before if number is None else number
    yield
    cards.current = before


def _waits(what: str) -> Callable[..., None]:
    return lambda *_, **__: waits_for(cards, what) if cards.current is not None else None


def _gives(value: object) -> Callable[..., Any]:
    return lambda *_, **__: value


def _forbid(mode: str) -> None:
    cards.forbidden = mode == "error"


def _memory(*_: Any, **__: Any) -> int:
    return cards.card.bytes_of(cards.here())


REPLACED: dict[str, tuple[str, Any]] = {
    # Asked of the driver, which is not there.
    "cuda.is_available": ("this machine has cards", _gives(True)),
    "accelerator.is_available": ("torch's loader pins where it has", _gives(True)),
    "accelerator.current_accelerator": ("the loader asks which", _gives(torch.device("cuda"))),
    "accelerator.current_device_index": ("the loader's thread takes this process's", lambda *_: cards.here()),
    "accelerator.current_stream": ("torch's optimizers ask whether it captures", lambda *_: Stream()),
    "accelerator.set_device_index": ("in the loader's thread, which has no card yet", _gives(None)),
    "cuda.device_count": ("one for each rank of the machine", lambda: cards.count),
    "cuda.is_initialized": ("once it has a card", lambda: cards.current is not None),
    "cuda.set_device": ("notes the card", set_device),
    "cuda.current_device": ("RuntimeError before set_device", lambda *_: cards.here()),
    "cuda.device": ("a block on another card", _on),
    "cuda.get_device_properties": ("an H100's", _gives(PROPERTIES)),
    "cuda.get_device_name": ("an H100's", _gives(PROPERTIES.name)),
    "cuda.get_device_capability": ("an H100's", _gives((9, 0))),
    # Memory: what tensors take, counted by storages.
    "cuda.memory_allocated": ("bytes noted on the card", _memory),
    "cuda.max_memory_allocated": ("no peak is kept: what is there now", _memory),
    "cuda.memory_reserved": ("nothing is cached", _memory),
    "cuda.max_memory_reserved": ("nothing is cached", _memory),
    "cuda.mem_get_info": ("of an H100", lambda *_: (MEMORY - _memory(), MEMORY)),
    "cuda.memory_stats": ("Megatron asks for some", _gives({})),
    "cuda.reset_peak_memory_stats": ("no peak is kept", _gives(None)),
    "cuda.empty_cache": ("nothing is cached", _gives(None)),
    # Time: the card does at once what it is asked, in order.
    "cuda.Stream": ("in order", NewStream),
    "cuda.Event": ("noted where the host waits", Event),
    "cuda.current_stream": ("in order", lambda *_: Stream()),
    "cuda.default_stream": ("in order", lambda *_: Stream()),
    "cuda.stream": ("in order", lambda _: nullcontext()),
    "cuda.set_stream": ("in order", _gives(None)),
    "cuda.synchronize": ("noted: the host waits", _waits("synchronize")),
    "cuda.set_sync_debug_mode": ("what waits is an error meanwhile", _forbid),
    "cuda._sleep": ("a card does at once what it is asked", _gives(None)),
    "cuda.is_current_stream_capturing": ("no graphs", _gives(False)),
    "cuda.nvtx.range_push": ("nobody profiles", _gives(None)),
    "cuda.nvtx.range_pop": ("nobody profiles", _gives(None)),
    # Chance: a card draws from the host's generator, so that its numbers are the CPU's.
    "cuda.get_rng_state": ("of the host's generator", lambda *_, **__: torch.get_rng_state()),
    "cuda.set_rng_state": ("of the host's generator", lambda state, *_, **__: torch.set_rng_state(state)),
    "cuda.random.get_rng_state": ("of the host's generator", lambda *_, **__: torch.get_rng_state()),
    "cuda.manual_seed": ("of the host's generator", torch.manual_seed),
    "cuda.manual_seed_all": ("torch.manual_seed calls it", _gives(None)),
    "cuda._lazy_call": ("CUDA is ready", lambda call, **_: call()),
    "cuda.default_generators": ("the host's", [torch.default_generator] * 16),
    "Tensor.record_stream": ("in order", _gives(None)),
    "Tensor.pin_memory": ("by no mode: the loader's thread, which knows none, pins too", lambda t, *_: calls().pin(t)),
    "autograd._engine_run_backward": ("torch calls it out of reach of modes", within_modes),
    # Mixed precision: torch's, of the CPU.
    "autocast": ("of the CPU's operations", Autocast),
    "is_autocast_enabled": ("of the CPU's operations", _of_cards(torch.is_autocast_enabled)),
    "get_autocast_dtype": ("of the CPU's operations", _of_cards(torch.get_autocast_dtype)),
    # Kernels and channels that are not there.
    "compile": ("no compiler for these cards: functions as they are", compiled),
    "nn.attention.varlen.varlen_attn": ("CUDA's kernel: segment by segment", varlen_attn),
    "distributed.is_nccl_available": ("it is", _gives(True)),
    "cuda.nccl.version": ("torch's log of checkpoints says it", _gives((2, 27, 3))),
    "distributed.ProcessGroupNCCL": (
        "its options", SimpleNamespace(Options=lambda **_: SimpleNamespace(config=SimpleNamespace()))),
    "distributed.init_process_group": ("gloo carries what NCCL would", backends.init_process_group),
    "distributed.new_group": ("gloo carries what NCCL would", backends.new_group),
    "distributed.Reducer": ("DDP's buckets", where_the_model_is(torch.distributed.Reducer)),
    "distributed._verify_params_across_processes": (
        "DDP's first message", where_the_model_is(torch.distributed._verify_params_across_processes)),
    "distributed.Work.wait": ("a card waits, not its host; what gloo does then is its own", wait_for_work),
    "distributed.distributed_c10d._get_object_coll_device": (
        "objects travel where tensors of the group are", backends.device_of),
    "distributed.get_backend": ("what was asked for", backends.of),
}  # fmt: skip
"""By their names in torch."""


def install() -> None:
    """Make torch say that it has cards; once, before Megatron is imported."""
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    for name, (_, stand_in) in REPLACED.items():
        put(name, stand_in)


def put(name: str, value: object) -> None:
    """Put a value where torch has what is found under this dotted name."""
    *path, last = name.split(".")
    setattr(reduce(getattr, path, torch), last, value)


def power_on() -> Cards:
    """The cards of this process, from here on."""
    global cards, _calls, _kernels  # noqa: PLW0603 (a process has one machine)
    cards = Cards(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    _calls, _kernels = Calls(cards), Kernels(cards, backends.of_boxed)
    _kernels.__enter__()
    _calls.__enter__()
    return cards


def power_off() -> None:
    """Nobody sees any more what is asked of them."""
    assert _kernels is not None
    calls().__exit__(None, None, None)
    _kernels.__exit__(None, None, None)
