"""What torch does with tensors on cards: asked in Python by `Calls`, computed by `Kernels`.

An operation on tensors of two cards, or of a card and the host, is the error that it is on CUDA; what makes the host
wait for its card is noted with the place in the code. The numbers are those of the CPU.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cards.places import Cards
from torch import Tensor
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
SIZED_BY_NUMBERS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
                    "equal", "is_nonzero", "repeat_interleave")  # fmt: skip
"""Operations that need to know numbers: the host waits for them."""
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
OURS = ("megatron/vlm", "megatron/core", "megatron/training", "omnibal_ext", "tools", "benchmarks", "tests/cards/run")
OCCASIONS = {
    "run": "schedule", "train_step": "step", "_report": "report", "training_log": "report", "end_interval": "report",
    "evaluate": "evaluation", "save_checkpoint": "save", "save_checkpoint_and_time": "save", "load_checkpoint": "start",
    "setup_model_and_optimizer": "start", "initialize_megatron": "start", "train": "iteration", "pretrain": "start",
}  # fmt: skip
"""What functions on the way to a wait are; the nearest counts."""
GLOO_TAKES = ("allreduce_", "broadcast_", "allgather_", "barrier")
"""Of tensors on cards; reductions of several and all that scatters it refuses."""


def place_in_code() -> str:
    """The nearest function of ours or Megatron's above this one, and what of the trainer it is part of."""
    place, occasion, frame = "", "", sys._getframe(2)
    while frame.f_back is not None and not occasion:
        path = frame.f_code.co_filename
        if not place and any(f"/{part}" in path for part in OURS):
            place = f"{'/'.join(Path(path).parts[-2:])}:{frame.f_code.co_name}"
        occasion = OCCASIONS.get(frame.f_code.co_name, "") if place else ""
        frame = frame.f_back
    return f"{occasion or 'else'}: {place}"


def waits_for(cards: Cards, why: str) -> None:
    """The host waits for its card, here."""
    cards.wait(f"{place_in_code()}, {why}")


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """All that an operation takes or gives; torch's own walk through trees takes as long as the operations."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from tensors_in(part)
    elif isinstance(tree, dict):
        yield from tensors_in(list(tree.values()))


class Calls(TorchFunctionMode):
    def __init__(self, cards: Cards) -> None:
        super().__init__()
        self.cards = cards
        self.rules: dict[Any, Callable[..., Any]] = {
            Tensor.to: self._to,
            Tensor.cuda: self._cuda,
            Tensor.cpu: lambda tensor, **_: self.move(tensor, None),
            Tensor.type: self._type,
            Tensor.device.__get__: cards.device_of,  # type: ignore[attr-defined]
            Tensor.is_cuda.__get__: lambda tensor: cards.of(tensor) is not None,  # type: ignore[attr-defined]
            Tensor.is_cpu.__get__: lambda tensor: cards.device_of(tensor).type == "cpu",  # type: ignore[attr-defined]
            Tensor.get_device: lambda tensor: -1 if cards.of(tensor) is None else cards.of(tensor),
            Tensor.numpy: self._numpy,
            Tensor.__array__: self._numpy,
            Tensor.tolist: self._tolist,
            Tensor.is_pinned: lambda tensor, *_: cards.pinned.get(tensor) is not None,
            Tensor.new_tensor: self._new_tensor,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if ShardedTensor in types:  # a checkpoint's, which is on no device
            return func(*args, **kwargs)
        if (rule := self.rules.get(func)) is not None:
            return rule(*args, **kwargs)
        asked = kwargs.get("device")
        if asked is None or str(asked).startswith("meta"):
            return func(*args, **kwargs)
        number = self.cards.number(asked)
        if func in FROM_DATA and isinstance(args[0], Tensor) and func is not torch.tensor:
            return self.move(args[0], number, kwargs.get("dtype")) if number != self.cards.of(args[0]) else args[0]
        if func in FROM_DATA and number is not None:
            waits_for(self.cards, f"{func.__name__} of the host's data")
        out = func(*args, **{**kwargs, "device": "cpu"})
        self.cards.put(tensors_in(out), number)
        return out

    def move(self, tensor: Tensor, number: int | None, dtype: Any = None, non_blocking: bool = False) -> Tensor:
        """A copy on a card, or on the host; the tensor itself where it is there already."""
        here = self.cards.of(tensor)
        if here == number:
            return tensor if dtype is None else tensor.to(dtype)
        if None not in (here, number):
            raise RuntimeError(f"a tensor goes from card {here} to card {number}")
        pinned = number is None or self.cards.pinned.get(tensor) is not None
        if not (non_blocking and pinned):
            waits_for(self.cards, "a copy between host and card")
        moved: Tensor = _Move.apply(self.cards, tensor, number, dtype)
        return moved

    def pin(self, tensor: Tensor, *_: Any) -> Tensor:
        """A copy of the host's that a card can read by itself."""
        if self.cards.of(tensor) is not None:
            raise RuntimeError("only the host's memory can be pinned")
        copy = tensor.clone()
        self.cards.pinned.note(copy, 1)
        return copy

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copy = kwargs.pop("copy", False)
        if args and isinstance(args[0], Tensor):
            device: Any = self.cards.device_of(args[0])
            dtype, non_blocking = args[0].dtype, kwargs.get("non_blocking", False)
        else:
            args = tuple(torch.device("cuda", a) if type(a) is int else a for a in args)
            if type(kwargs.get("device")) is int:
                kwargs["device"] = torch.device("cuda", kwargs["device"])
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None and device.type == "meta":
            return tensor.to(device, dtype)
        number = self.cards.of(tensor) if device is None else self.cards.number(device)
        if number == self.cards.of(tensor):
            return tensor.to(dtype or tensor.dtype, copy=copy)
        return self.move(tensor, number, dtype, non_blocking)

    def _cuda(self, tensor: Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> Tensor:
        number = self.cards.here() if device is None else self.cards.number(device)
        return self.move(tensor, number, None, non_blocking)

    def _type(self, tensor: Tensor, dtype: Any = None, *_: Any, **__: Any) -> Any:
        if dtype is None:
            name = tensor.type()
            return name if self.cards.of(tensor) is None else name.replace("torch.", "torch.cuda.")
        return tensor.type(dtype.replace("cuda.", "") if isinstance(dtype, str) else dtype)

    def _numpy(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.cards.of(tensor) is not None:
            raise TypeError(f"can't convert {self.cards.device_of(tensor)} device type tensor to numpy")
        return tensor.numpy(*args, **kwargs)

    def _tolist(self, tensor: Tensor) -> Any:
        if self.cards.of(tensor) is not None:
            waits_for(self.cards, "tolist")
        return tensor.tolist()

    def _new_tensor(self, tensor: Tensor, data: Any, **how: Any) -> Tensor:
        number = self.cards.of(tensor) if how.get("device") is None else self.cards.number(how["device"])
        if number is not None:
            waits_for(self.cards, "new_tensor of the host's data")
        out = torch.tensor(data, dtype=how.get("dtype") or tensor.dtype, requires_grad=how.get("requires_grad", False))
        self.cards.put([out], number)
        return out


def _fills(args: Any) -> bool:
    """Whether one of the host's numbers goes where a mask is: torch then fills, and does not ask where that is."""
    values, adds = args[2:3], args[3:4]
    return bool(values) and values[0].numel() == 1 and not values[0].dim() and not any(adds)


class _Move(torch.autograd.Function):
    """A copy elsewhere; its gradient goes back."""

    @staticmethod
    def forward(ctx: Any, cards: Cards, tensor: Tensor, number: int | None, dtype: Any) -> Tensor:
        ctx.cards, ctx.back, ctx.dtype = cards, cards.of(tensor), tensor.dtype
        out = tensor.to(dtype or tensor.dtype, copy=True)
        cards.put([out], number)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        back = grad.to(ctx.dtype, copy=True)
        ctx.cards.put([back], ctx.back)
        return None, back, None, None


CUDA_ALONE = {
    aten.mm.dtype: lambda left, right, dtype: left.to(dtype) @ right.to(dtype),
    aten.addmm.dtype_out: lambda total, left, right, dtype, *, out: torch.addmm(
        total, left.to(dtype), right.to(dtype), out=out
    ),
}
"""Operations that the CPU does not have."""


class Kernels(TorchDispatchMode):
    def __init__(self, cards: Cards, backend_of: Callable[[Any], str]) -> None:
        """`backend_of(process group)`: what it was asked to be, "nccl" or "gloo"."""
        super().__init__()
        self.cards, self.backend_of = cards, backend_of
        self.making: int | None = None
        """The card of all that C++ makes, which asks a tensor's memory where it is, and hears of the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            tensors = [t for t in tensors_in((args, kwargs)) if t.device.type == "cpu"]
            place = self._place(func, args, kwargs, tensors)
            place = self.making if place is None else place
            out = CUDA_ALONE.get(func, func)(*args, **kwargs)
            if place is not None:
                known = {t.untyped_storage()._cdata for t in tensors}
                made = (t for t in tensors_in(out) if t.device.type == "cpu")
                self.cards.put((t for t in made if t.untyped_storage()._cdata not in known), place)
        return out

    def _place(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> int | None:
        """The card that computes; None: the host. RuntimeError where tensors are not together."""
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d":
            self._message(name, args, tensors)
            return self.cards.of(tensors[0]) if tensors else None
        if name == "copy_":
            self._copy(*args[:2], (len(args) > 2 and args[2]) or kwargs.get("non_blocking", False))
            return None
        if name in INDEXED:
            indices = [t for t in args[1] if t is not None]
            place = self.cards.of(args[0])
            hosted = [t for t in indices if place is not None and self.cards.of(t) is None and t.dim()]
            masks = any(t.dtype in (torch.bool, torch.uint8) for t in indices)
            if place is not None and (hosted or (masks and not _fills(args))):
                waits_for(self.cards, f"{name} by the host's indices or by a mask")
            tensors = [t for t in tensors if not any(t is one for one in indices)] + [
                t for t in indices if not any(t is one for one in hosted)
            ]
        places = {self.cards.of(t) for t in tensors if t.dim() or self.cards.of(t) is not None}
        if len(places) > 1:
            raise RuntimeError(f"tensors are not on one device in {func}: cards {places} (None: the host)")
        place = next(iter(places), None)
        if place is not None and name in SIZED_BY_NUMBERS and not kwargs.get("output_size"):
            waits_for(self.cards, name)
        return place

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> None:
        there, here = self.cards.of(target), self.cards.of(source)
        if there == here or (here is None and not source.dim()):
            return
        if None not in (there, here):
            raise RuntimeError(f"a tensor is copied from card {here} to card {there}")
        if not (non_blocking and self.cards.pinned.get(source if here is None else target) is not None):
            waits_for(self.cards, "a copy between host and card")

    def _message(self, name: str, args: Any, tensors: list[Tensor]) -> None:
        groups = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
        backends = {self.backend_of(group) for group in groups} - {""}
        places = {self.cards.of(t) for t in tensors}
        if "nccl" in backends and name != "barrier" and None in places:
            raise RuntimeError(f"NCCL takes no tensor of the host's: {name}")
        if "gloo" in backends and places != {None} and name not in GLOO_TAKES:
            raise RuntimeError(f"gloo's {name} takes the host's tensors alone: unsupported device type cuda")
        if places - {None, self.cards.current}:
            raise RuntimeError(f"{name} of a tensor on another card: {places}")
