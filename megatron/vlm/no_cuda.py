"""Stand-ins for CUDA on a machine that has none.

Megatron assumes CUDA in many places: the few `torch.cuda` functions that it calls are replaced, and a function mode
turns "cuda" devices into CPU.
"""

import contextlib
import logging
import os
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CudaIs(TorchFunctionMode):
    """Sends tensors that ask for CUDA to another device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs["device"] = self.device
        if func is torch.Tensor.cuda:
            return args[0].to(self.device)
        if func is torch.Tensor.to and len(args) > 1 and _names_cuda(args[1]):
            args = (args[0], self.device, *args[2:])
        if func is torch.Tensor.type and len(args) == 1:
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **kwargs)


def _names_cuda(value: object) -> bool:
    return isinstance(value, (str, torch.device)) and str(value).startswith("cuda")


class _Stream:
    """A CUDA stream or event on a machine where everything happens in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def record_event(self, *_: Any) -> "_Stream":
        return _Stream()

    def elapsed_time(self, _: "_Stream") -> float:
        return 0.0


def _returns(value: object) -> Callable[..., Any]:
    """A new function that takes anything and returns `value` (torch wants one function a name, not one for several)."""
    return lambda *_, **__: value


def stand_in() -> None:
    """Replace what Megatron calls of `torch.cuda`; the functions are named after theirs."""
    properties = types.SimpleNamespace(major=8, minor=0, name="cpu", total_memory=2**34, multi_processor_count=1)
    stand_ins: dict[str, Callable[..., Any]] = {
        "is_available": _returns(True),
        "current_device": _returns(CPU),
        "device_count": lambda: max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "is_current_stream_capturing": _returns(False),
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "stream": lambda _: contextlib.nullcontext(),
        "memory_stats": lambda *_: {},
        "get_device_capability": _returns((8, 0)),
        "get_device_properties": _returns(properties),
        "get_device_name": _returns("cpu"),
    }
    for name in ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"):
        stand_ins[name] = _returns(None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        stand_ins[name] = _returns(0)
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    # A build for CUDA would take the stand-ins for a device, and ask its driver: torch is to know that there is none.
    setattr(torch._C, "_accelerator_getAccelerator", _returns(None))  # noqa: B010 (mypy refuses a plain assignment)
    for accelerator in (
        torch.cuda,
        torch.mtia,
        torch.xpu,
    ):  # torch notes every seed for one that may come, stack and all
        setattr(accelerator, "manual_seed_all", _returns(None))  # noqa: B010 (mypy refuses a plain assignment)
    setattr(torch.nn.Module, "cuda", lambda self, *_, **__: self)  # noqa: B010 (mypy refuses a plain assignment)
    CudaIs(CPU).__enter__()

    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    # It warns, mask by mask, that the host's generator moves with the device's: here they are one.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
