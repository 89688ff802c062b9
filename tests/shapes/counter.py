"""Counts what a device is asked: kernels, bytes of elementwise work, operations of products; and finds what waits."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry, register_flop_formula

aten = torch.ops.aten
ATTENTION = ("flash_attention", "varlen_attn")
FREE = ("empty", "detach", "prim.device", "_unsafe_view", "_reshape_alias", "wait_tensor", "record_stream")
"""Parts of the names of what takes no kernel."""
WIDE = (torch.float32, torch.float64)


@register_flop_formula(aten._grouped_mm)
def _of_groups(left: tuple[int, ...], right: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Of rows that lie group by group, or of sums within groups: either way each row meets one matrix."""
    return 2 * prod(left) * right[-1]


class Count(TorchDispatchMode):
    """What was asked while it is open, of the device that is not the CPU."""

    current: "Count | None" = None

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        """Read and written by all but products, attention and messages; by kernel."""
        self.operations = 0
        """Of matrix products, forward and backward."""
        self.attention_operations = 0
        self.messages: Counter[str] = Counter()
        """Bytes of what is sent to other ranks."""
        self.waits: list[str] = []
        """What makes the host wait for the device."""
        self.wide: list[str] = []
        """fp32 tensors made of half-precision ones, outside of kernels, by name and shape."""
        self._inside = 0
        self._asked = self._reached = 0

    def __enter__(self) -> "Count":
        Count.current = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        Count.current = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._inside:
            self._count(func, (args, kwargs or {}), out)
        return out

    def _count(self, func: Any, given: Any, out: Any) -> None:
        name = str(func)
        tensors, made = _tensors(given), _tensors(out)
        if any(part in name for part in FREE) or (_is_view(func) and "copy" not in name):
            return
        self._look_for_waits(name, given, tensors, made)
        device = [t for t in (*tensors, *made) if t.device.type != "cpu"]
        if not device:
            return
        if name.startswith("c10d"):
            self.messages[name] += sum(t.nbytes for t in tensors)
        elif any(part in name for part in ATTENTION):
            self.kernels[name] += 1
            query, key = tensors[:2] if "backward" not in name else tensors[1:3]
            self.attention_operations += attention_operations(query, key) * (5 if "backward" in name else 2) // 2
        elif func._overloadpacket in flop_registry:
            self.kernels[name] += 1
            factors = [one for one in given[0] if not isinstance(one, torch.dtype)]  # of the sum, which formulas miss
            self.operations += flop_registry[func._overloadpacket](*factors, **given[1], out_val=out)
        else:
            self.kernel(name, tensors, made)
            half = [t for t in tensors if t.dtype in (torch.bfloat16, torch.float16) and t.dim() > 1]
            if half and any(t.dtype in WIDE and t.numel() == half[0].numel() for t in made):
                self.wide.append(f"{name} {list(half[0].shape)}")

    def kernel(self, name: str, read: list[Tensor], written: list[Tensor]) -> None:
        """One kernel that reads and writes these once."""
        self.kernels[name] += 1
        known = {t.untyped_storage()._cdata for t in read}
        new = [t for t in written if t.untyped_storage()._cdata not in known or name.endswith("_.Tensor")]
        self.bytes[name] += sum(t.numel() * t.element_size() for t in (*read, *new))

    def _look_for_waits(self, name: str, given: Any, tensors: list[Tensor], made: list[Tensor]) -> None:
        if "copy" not in name and "_to" not in name:
            return
        # What copies many tensors at once gives nothing back.
        ends = ({t.device.type for t in tensors[-1:]}, {t.device.type for t in made or tensors})
        waits = not (given[1].get("non_blocking") or (name.startswith("aten.copy_") and given[0][2:] == (True,)))
        if ends[0] != ends[1] and (waits or "cpu" in ends[1]):
            self.waits.append(f"{name}: {ends[0]} -> {ends[1]}")

    def catch_up(self) -> None:
        """The host reads what the device has computed last: Megatron does so once an iteration."""
        self._reached = self._asked

    @contextmanager
    def one_kernel(self, name: str, read: Any) -> Iterator[list[Any]]:
        """What runs inside is one kernel; the block appends what it gives."""
        given: list[Any] = []
        self._inside += 1
        try:
            yield given
        finally:
            self._inside -= 1
        if not self._inside:
            self.kernel(name, _tensors(read), _tensors(given))


class Event:
    """Takes the place of `torch.cuda.Event`: the host waits for one that it has no other reason to know as reached."""

    device = None

    def __init__(self, **_: Any) -> None:
        self.number = 0

    def record(self, *_: Any) -> None:
        if Count.current is not None:
            Count.current._asked += 1
            self.number = Count.current._asked

    def query(self) -> bool:
        return Count.current is None or self.number <= Count.current._reached

    def synchronize(self) -> None:
        if Count.current is not None and self.number > Count.current._reached:
            Count.current.waits.append("an event is waited for")

    def elapsed_time(self, _: "Event") -> float:
        return 1.0


def attention_operations(query: Tensor, key: Tensor) -> int:
    """Two products over all pairs, forward: query [b, heads, s, d] or [T, heads, d]."""
    *batch, heads, rows, width = query.shape if query.dim() == 4 else (query.shape[1], query.shape[0], query.shape[2])
    others = key.shape[2] if key.dim() == 4 else key.shape[0]
    return 4 * prod(batch) * heads * rows * others * width


def _tensors(tree: Any) -> list[Tensor]:
    """Each storage once."""
    found = {id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    return list(found.values())


def _is_view(func: Any) -> bool:
    aliases = [argument.alias_info for argument in func._schema.arguments if argument.alias_info]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def run_as_kernel(function: Callable[..., Any], *arguments: Any) -> Any:
    """Takes the place of `transformer_engine.pytorch.kernels.run`."""
    if Count.current is None:
        return function(*arguments)
    with Count.current.one_kernel(function.__name__, arguments) as given:
        given.append(function(*arguments))
    return given[0]


def compiled(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Takes the place of `torch.compile`: one kernel forward, one backward that computes again what it needs.

    Regions of a layer are more than one kernel, and stay as they are.
    """
    if function is None:
        return compiled
    if options.get("fullgraph"):
        return function

    def launch(*arguments: Any, **options: Any) -> Any:
        if Count.current is None or Count.current._inside:
            return function(*arguments, **options)
        leaves, spec = tree_flatten((arguments, options))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def pure(*tensors: Tensor) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            given, named = tree_unflatten(filled, spec)
            return function(*given, **named)

        pure.__name__ = getattr(function, "__name__", "compiled")
        if not torch.is_grad_enabled():
            with Count.current.one_kernel(pure.__name__, (arguments, options)) as given:
                given.append(function(*arguments, **options))
            return given[0]
        return _Compiled.apply(pure, *(leaves[place] for place in places))

    return launch


class _Compiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pure: Any, *tensors: Tensor) -> Any:
        count = Count.current
        assert count is not None
        ctx.pure = pure
        with count.one_kernel(pure.__name__, tensors) as given:
            given.append(pure(*tensors))
            needed = _needed(pure, tensors, ctx.needs_input_grad[1:])
        ctx.places = needed
        ctx.others = [(t.shape, t.dtype, t.device) for t in tensors]
        ctx.save_for_backward(*(tensors[place] for place in needed))
        return given[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = Count.current
        assert count is not None
        saved = ctx.saved_tensors
        with count.one_kernel(f"{ctx.pure.__name__} backward", (saved, grads)) as written:
            inputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others]
            wanted = [place for place, needs in enumerate(ctx.needs_input_grad[1:]) if needs]
            inputs = [t.requires_grad_(place in wanted) for place, t in enumerate(inputs)]
            with torch.enable_grad():
                out = ctx.pure(*inputs)
            outs = out if isinstance(out, tuple) else (out,)
            pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if o.requires_grad and g is not None]
            found = torch.autograd.grad(
                [o for o, _ in pairs], [inputs[place] for place in wanted], [g for _, g in pairs]
            )
            written.extend(found)
        by_place = dict(zip(wanted, found, strict=True))
        return None, *(by_place.get(place) for place in range(len(inputs)))


def _needed(pure: Any, tensors: tuple[Tensor, ...], trained: tuple[bool, ...]) -> list[int]:
    """Inputs that a compiler keeps for the backward: those it needs, or can compute what it needs again from."""
    kept: list[Tensor] = []
    leaves = [t.detach().requires_grad_(needs) for t, needs in zip(tensors, trained, strict=True)]
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with torch.enable_grad(), hooks:
        pure(*leaves)
    storages = {leaf.untyped_storage()._cdata for leaf in leaves}
    needed: set[int] = set()
    for tensor in kept:
        storage = tensor.untyped_storage()._cdata
        needed |= {storage} if storage in storages else _origins(tensor)
    return [place for place, leaf in enumerate(leaves) if leaf.untyped_storage()._cdata in needed]


def _origins(tensor: Tensor) -> set[int]:
    """The storages of the leaves that a tensor was computed from."""
    found, seen, waiting = set[int](), set[Any](), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(node.variable.untyped_storage()._cdata)
        waiting += [following for following, _ in node.next_functions]
    return found
