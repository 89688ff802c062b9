"""A dense transformer layer as one compiled region: the host makes one call forward and one backward.

    hidden ── norm, query / key / value, their norms, rotation, attention, output, residual, norm, perceptron ──>

Torch's compiler does not follow core's Python, which is run once with tensors that have shapes alone: what is no
operation on them, tensor parallelism of size 1 among it, is gone, and what lies between two products is one kernel.
Attention and the gradients of a product are operations that the compiler does not look into; the latter are added to
`main_grad` where core's linear layers add them, so packs may pass a layer by its region or without.

Layers of one kind in a chain share a region: weights are inputs of it, and so are rows, of any number. It is tried
before it is used. Layers and packs of which this does not hold run as they are (`is_fit`, `_inputs`).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from types import FunctionType
from typing import Any

import torch
from megatron.core import jit
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils import stateless

from megatron.vlm import core_patches, platform
from megatron.vlm.compiling import mark_rows
from megatron.vlm.microbatch import Segments
from omnibal_ext.output import printable, say

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""How far a region's output and gradients may be from the layer's, by the norm of each: a few roundings."""
UNREAD: dict[tuple[torch.dtype, torch.device], Tensor] = {}
Tensors = tuple[Tensor, ...]
Inputs = tuple[Tensor, Tensors, tuple[Any, ...]]
"""Hidden states; the pack's rotation; bounds of its segments, the longest, are they causal: for tiles ()."""


class RegionLayer(TransformerLayer):
    """Core's transformer layer, which may be compiled."""

    region: "Region | None" = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Weights and buffers by name, as they are now: another may have taken a weight's place."""
        return {
            f"{path}{name}": one
            for path, module in self.holders
            for name, one in (*module._parameters.items(), *module._buffers.items())
            if one is not None
        }

    @cached_property
    def holders(self) -> Sequence[tuple[str, torch.nn.Module]]:
        """The modules that have weights or buffers, behind what their names begin with."""
        named = ((f"{path}." if path else "", one) for path, one in self.named_modules())
        return [(path, one) for path, one in named if one._parameters or one._buffers]

    def run(self, hidden: Tensor, seen: Any, padding_mask: Any = None) -> Tensor:
        """Map [rows, 1, width] to [rows, 1, width], by the layer's region or core's forward."""
        out = None if self.region is None else self.region(self, hidden, seen)
        if out is None:
            out = super().forward(hidden, attention_mask=None, packed_seq_params=seen, padding_mask=padding_mask)[0]
        return out


def is_fit(layer: Any) -> bool:
    """Check whether a layer is to be a region, which `TORCHDYNAMO_DISABLE=0` asks for, and may be: dense, of one rank,
    with core's linear layers, an attention that is one operation, and no random numbers."""
    if not platform.compiles_layers() or jit.jit_fuser is jit.noop_decorator:  # --disable-jit-fuser
        return False
    config, attention = layer.config, getattr(layer.self_attention, "core_attention", None)
    draws = config.hidden_dropout or config.attention_dropout or getattr(layer, "drop_path", 0)
    is_cores = config.transformer_impl == "local" and config.tensor_model_parallel_size == 1 and not config.fp8
    is_one_operation = getattr(attention, "is_one_operation", False) and not hasattr(layer.self_attention, "given")
    return bool(is_cores and isinstance(layer.mlp, MLP) and is_one_operation and not draws)


class Region:
    """The compiled form of layers of one kind."""

    def __init__(self) -> None:
        self._is_off = False
        """Whether it failed, or gave other numbers than a layer."""
        self._forms: set[tuple[bool, ...]] = set()
        self._tried: set[object] = set()
        """Graphs whose numbers are the layer's; no other's are used."""
        self._ran: object = None
        self._layer: Any = None

        @torch._dynamo.nonstrict_trace
        def traced(inputs: Inputs, weights: Tensors, adds: bool) -> Tensor:
            return _as_operations(self._layer, inputs, weights, adds)

        def run(inputs: Inputs, weights: Tensors, adds: bool) -> Tensor:
            return traced(inputs, weights, adds)

        # A code of its own, by which torch keeps and counts what it compiled.
        own = FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)
        self._launch = torch.compile(own, backend=self._compile, dynamic=True, fullgraph=True)

    def __call__(self, layer: RegionLayer, hidden: Tensor, seen: Any) -> Tensor | None:
        """Map [rows, 1, width] to the layer's output; None: the layer is to run as it is."""
        inputs = None if self._is_off or _is_watched() else _inputs(hidden, seen)
        if inputs is None:
            return None
        # To the compiler a batch of one is another size, and what needs no gradient another input. Of a layer that is
        # recomputed both forms are tried in the forward pass, while there is memory.
        needs, is_one = hidden.requires_grad, hidden.shape[0] == layer.self_attention.core_attention.tokens
        forms = [(grads, needs, is_one) for grads in (torch.is_grad_enabled(), torch.is_grad_enabled() or needs)]
        try:
            for _, module in layer.holders:
                for hook in module._forward_pre_hooks.values():  # Megatron's wait for gathered weights
                    hook(module, ())
            for is_new in (not self._forms.issuperset(forms), True):
                for form in dict.fromkeys(forms) if is_new else ():
                    self._try(layer, inputs, form[0])
                    self._forms.add(form)
                out = self._compiled(layer, inputs, tuple(layer.tensors.values()))
                if self._ran in self._tried:
                    return out
                del out  # by a graph that was not tried: what torch compiles anew, and when, is its own choice
            raise RuntimeError("what is compiled for a call is not what is for a trial")
        except Exception as error:  # a compiler's may be any, or lack memory, which is free again behind this
            self._is_off = True
            _say(layer, f"run uncompiled: {error}")
            return None

    def _compile(self, graph: Any, given: Any) -> Callable[..., Any]:
        """Compile a graph, and what runs backward at once, which would else be made, or fail, in a backward pass; let
        its calls be told from those of others."""
        from torch._inductor.compile_fx import compile_fx

        # The cache of graphs as they are given does not look into a function that is not followed.
        with torch._functorch.config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False):
            made: Any = compile_fx(graph, given)

        def noted(*arguments: Any) -> Any:
            self._ran = made
            return made(*arguments)

        return noted

    def _compiled(self, layer: RegionLayer, inputs: Inputs, weights: Tensors) -> Tensor:
        # Small functions mark rows in place, and a mark that the compiler has not seen is another input to it.
        mark_rows(inputs)
        self._ran = None
        self._layer = layer  # not longer than a call: nobody else holds its weights
        try:
            out: Tensor = self._launch(inputs, weights, _adds(layer, weights))
            return out
        finally:
            self._layer = None

    def _try(self, layer: RegionLayer, inputs: Inputs, grads: bool) -> None:
        """Compare output and gradients of the compiled layer with the layer's. Raises RuntimeError if they differ."""
        with torch.set_grad_enabled(grads):
            found, expected = (_outcome(run, layer, inputs) for run in (self._compiled, _as_it_is))
            apart = max(map(_apart, found, expected))
        form = f"({len(inputs[0])} rows, with{'' if grads else 'out'} gradients)"
        if apart > TOLERANCE[inputs[0].dtype]:
            raise RuntimeError(f"compiled {apart:.1e} off {form}")
        self._tried.add(self._ran)
        _say(layer, f"are compiled {form}")


def _is_watched() -> bool:
    """Check whether hooks replace what autograd keeps: a product's backward would find no weight, but what is one."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _adds(layer: RegionLayer, weights: Iterable[Tensor]) -> bool:
    """Check whether gradients of products go to `main_grad`."""
    is_fused = layer.config.gradient_accumulation_fusion and torch.is_grad_enabled()
    return is_fused and any(weight.requires_grad and hasattr(weight, "main_grad") for weight in weights)


def _say(layer: RegionLayer, ends: str) -> None:
    """Print what became of layers of one kind, by the number of one of them, on every rank that has them."""
    which = f"{type(layer).__name__} as number {layer.layer_number}"
    words = f"rank {torch.distributed.get_rank()}: layers of {which} {ends}".split()
    say(printable(" ".join(words)[:300]))


def _inputs(hidden: Tensor, seen: Segments | None) -> Inputs | None:
    """Return what a region is given of a pack; None: its attention is more than one operation."""
    if seen is None:
        return hidden, (), ()
    if seen.masks or seen.exchange is not None:
        return None
    rotation = tuple(one for one in seen.rotation or () if one is not None)
    return hidden, rotation, (seen.cu_seqlens_q, seen.max_seqlen_q, seen.causal)


def _as_it_is(layer: Any, inputs: Inputs, weights: Tensors) -> Tensor:
    """Run core's forward of a layer, with these weights instead of its own."""
    hidden, rotation, bounds = inputs
    seen = None
    if bounds:
        starts, longest, causal = bounds
        limits = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": longest, "max_seqlen_kv": longest}
        turn: Any = (*rotation, None)[:3] if rotation else None
        seen = Segments(qkv_format="sbhd", causal=causal, rotation=turn, **limits)
    with stateless._reparametrize_module(layer, dict(zip(layer.tensors, weights, strict=True))):
        out: Tensor = TransformerLayer.forward(layer, hidden, attention_mask=None, packed_seq_params=seen)[0]
    return out


def _as_operations(layer: Any, inputs: Inputs, weights: Tensors, adds: bool) -> Tensor:
    """Run it with products as torch's compiler is to see them."""
    linears = [one for one in layer.modules() if isinstance(one, ColumnParallelLinear | RowParallelLinear)]
    own = [vars(one).get("_forward_impl") for one in linears]
    for one in linears:
        one._forward_impl = partial(_multiply, adds)
    try:
        return _as_it_is(layer, inputs, weights)
    finally:
        for one, multiply in zip(linears, own, strict=True):
            del one._forward_impl
            if multiply is not None:
                one._forward_impl = multiply


def _multiply(adds: bool, input: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    if not weight.requires_grad:
        return linear(input, weight, bias)
    product: Tensor = _Product.apply(input, weight, bias, adds)
    return product


class _Product(torch.autograd.Function):
    """A linear layer: rows [..., columns], weight [rows, columns] and bias -> [..., rows]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, adds: bool) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.has_bias, ctx.adds = bias is not None, adds
        return linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        of_rows, of_weight = torch.ops.omnibal.gradients(flat, rows.flatten(0, -2), weight, ctx.adds)
        return of_rows.view_as(rows), of_weight, flat.sum(0) if ctx.has_bias else None, None


def _gradients(grad: Tensor, rows: Tensor, weight: Any, adds: bool) -> Tensors:
    """Return the gradients of rows [n, columns] and weight; if it `adds` the latter to `main_grad`, nobody reads it.

    Raises RuntimeError where this is not the weight that has it: the gradient would be lost.
    """
    of_rows = grad @ weight
    if not adds:
        return of_rows, grad.t() @ rows
    if getattr(weight, "main_grad", None) is None:
        raise RuntimeError("a compiled layer's gradient has no main_grad to go to: its backward was given a copy")
    platform.add_product(weight.main_grad, grad.t(), rows)
    return of_rows, core_patches.added_already(weight, _unread)


def _unread(weight: Tensor) -> Tensor:
    """Return one memory for all gradients that nobody reads: those of a whole layer are there at once."""
    size, kind = weight.numel(), (weight.dtype, weight.device)
    if kind not in UNREAD or len(UNREAD[kind]) < size:
        UNREAD[kind] = weight.detach().new_empty(size)
    return UNREAD[kind][:size].view_as(weight)


LIBRARY = torch.library.Library("omnibal", "DEF")
LIBRARY.define("gradients(Tensor grad, Tensor rows, Tensor weight, bool adds) -> (Tensor, Tensor)")
LIBRARY.impl("gradients", _gradients, "CompositeExplicitAutograd")
torch.library.register_fake(
    "omnibal::gradients", lambda _, rows, weight, __: (torch.empty_like(rows), torch.empty_like(weight)), lib=LIBRARY
)


def _outcome(function: Callable[..., Tensor], layer: RegionLayer, inputs: Inputs) -> list[Tensor]:
    """Return output and gradients of a layer, by leaves that share memory with its input and weights."""
    hidden, *weights = leaves = [_leaf(one) for one in (inputs[0], *layer.tensors.values())]
    wanted = [leaf for leaf in leaves if leaf.requires_grad and torch.is_grad_enabled()]
    for weight in set(wanted) - {hidden} if _adds(layer, layer.tensors.values()) else ():
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=torch.float32), False
    out = function(layer, (hidden, *inputs[1:]), tuple(weights))
    grads = torch.autograd.grad(out, wanted, hidden.detach()) if wanted else ()
    added = [float(getattr(leaf, "grad_added_to_main_grad", False)) for leaf in wanted]
    found = (leaf.main_grad if is_there else grad for leaf, grad, is_there in zip(wanted, grads, added, strict=True))
    return [out, torch.tensor([1.0, *added]), *found]


def _leaf(tensor: Tensor) -> Any:
    """Return a leaf that shares a tensor's memory: a weight if it is one, whose shape the compiler takes for fixed."""
    alone = tensor.detach()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(alone, tensor.requires_grad)
    return alone.requires_grad_(tensor.requires_grad)


def _apart(mine: Tensor, its: Tensor) -> float:
    """Return the difference of two tensors by the norm of one; infinite where it is no number."""
    mine, its = mine.detach().float(), its.detach().float()
    return float(((mine - its).norm() / its.norm().clamp(min=1e-9)).nan_to_num(torch.inf))
