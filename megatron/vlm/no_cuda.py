"""Stand-ins for CUDA on a machine that has none.

Megatron assumes CUDA in many places: the few `torch.cuda` functions that it calls are replaced, and so is what makes
and moves tensors, which takes "cuda" for the CPU.
"""

import contextlib
import functools
import logging
import os
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")


MAKERS = (
    *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like"),
    *("linspace", "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm"),
    *("scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like"),
)
"""Functions of torch that take a device."""
NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
"""Methods of tensors that take a device."""


def send_cuda_to(device: torch.device) -> None:
    """Have tensors that ask for CUDA made on, or moved to, another `device`, from here on.

    A function mode of torch's could do that too, but would be asked about every call: a fifth of a rank's time.
    """
    _device_constructors()  # torch lists its own now, for `with torch.device("meta")`, and knows only these again
    for owner, names in ((torch, MAKERS), (torch.Tensor, NEW)):
        for name in names:
            setattr(owner, name, _sent(getattr(owner, name), device))
    to, type_of = torch.Tensor.to, torch.Tensor.type

    def move(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and _names_cuda(args[0]):
            args = (device, *args[1:])
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = device
        return to(tensor, *args, **kwargs)

    def name_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return type_of(tensor, *args, **kwargs)
        return type_of(tensor).replace("torch.", "torch.cuda.")

    methods = {"to": move, "type": name_type, "cuda": lambda tensor, *_, **__: to(tensor, device)}
    for name, method in methods.items():
        setattr(torch.Tensor, name, method)


def _sent(make: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs["device"] = device
        return make(*args, **kwargs)

    if (operator := torch.jit._builtins._find_builtin(make)) is not None:
        torch.jit._builtins._register_builtin(made, operator)  # for torch.jit.script of other packages
    return made


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
    """Make a new function that takes anything and returns `value` (torch wants one function a name)."""
    return lambda *_, **__: value


def stand_in() -> None:
    """Replace what Megatron calls of `torch.cuda` by functions that work on the CPU, named after theirs."""
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
    send_cuda_to(CPU)

    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    # It warns, mask by mask, that the host's generator moves with the device's: here they are one.
    logging.getLogger(random.__name__).setLevel(logging.ERROR)
