"""Linear layers over tensor-parallel ranks, with a norm in front or without."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.fp8 import in_eight_bits
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
from transformer_engine.pytorch.module.norms import normalise


class _Multiply(torch.autograd.Function):
    """x w^T; under sequence parallelism the input is kept as the share it is, and gathered again for the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: Any) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x, weight)
        gathers = module.parallel_mode == "column" and module.shares
        out = torch.matmul(in_eight_bits(module.gathered(x) if gathers else x), in_eight_bits(weight).t())
        if module.parallel_mode == "row" and module.tp_size > 1:
            out = module.scattered(out) if module.shares else module.reduced(out)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        module, (x, weight) = ctx.module, ctx.saved_tensors
        column, row = module.parallel_mode == "column", module.parallel_mode == "row"
        if row and module.shares:
            grad = module.gathered(grad)
        grad_x = torch.matmul(in_eight_bits(grad), in_eight_bits(weight))
        if column and module.tp_size > 1:
            grad_x = module.scattered(grad_x) if module.shares else module.reduced(grad_x)
        entering = module.gathered(x) if column and module.shares else x
        if not module.weight.requires_grad:
            return grad_x, None, None, None
        if module.wgrad_store.delay_wgrad_compute():
            module.wgrad_store.put((entering, grad), module.weight_gradients)
            return grad_x, None, None, None
        wgrad, bgrad = module.weight_gradients(entering, grad)
        return grad_x, wgrad, bgrad if ctx.needs_input_grad[2] else None, None


class _Parallel(TransformerEngineBaseModule):
    def place(self, in_features: int, out_features: int, tp_group: Any, tp_size: int, share: bool, mode: Any) -> None:
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, mode
        self.sequence_parallel = self.shares = tp_size > 1 and share
        self.in_features = in_features // tp_size if mode == "row" else in_features
        self.out_features = out_features // tp_size if mode == "column" else out_features

    def weights(
        self, dtype: Any, device: Any, bias: bool, init_method: Any, get_rng_state_tracker: Any, delay: bool
    ) -> None:
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=dtype, device=device))
        if init_method is not None:
            with get_rng_state_tracker().fork() if get_rng_state_tracker else nullcontext():
                init_method(self.weight)
        self.bias = torch.nn.Parameter(torch.zeros(self.out_features, dtype=dtype, device=device)) if bias else None
        if self.parallel_mode is None:
            return
        for weight, dim in ((self.weight, 0 if self.parallel_mode == "column" else 1), (self.bias, 0)):
            if weight is None:
                continue
            if weight is self.bias and self.parallel_mode == "row":
                weight.sequence_parallel = self.shares  # type: ignore[attr-defined]
                continue
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            weight.partition_dim, weight.partition_stride = dim, 1  # type: ignore[attr-defined]
        for weight in (self.weight, self.bias) if delay else ():
            if weight is not None:
                weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def gathered(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x) * self.tp_size, *x.shape[1:])
        torch.distributed.all_gather_into_tensor(out, x.contiguous(), group=self.tp_group)
        return out

    def scattered(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x) // self.tp_size, *x.shape[1:])
        torch.distributed.reduce_scatter_tensor(out, x.contiguous(), group=self.tp_group)
        return out

    def reduced(self, x: Tensor) -> Tensor:
        torch.distributed.all_reduce(x, group=self.tp_group)
        return x

    def weight_gradients(self, entering: Tensor, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        rows, columns = grad.flatten(end_dim=-2), in_eight_bits(entering).flatten(end_dim=-2)
        in_product = self.use_bias and not self.return_bias and self.parallel_mode != "row"
        bgrad = rows.sum(0) if in_product else None
        weight: Any = self.weight
        if not self.fuse_wgrad_accumulation:
            return rows.t() @ columns, bgrad
        weight.main_grad.addmm_(rows.t().to(weight.main_grad.dtype), columns.to(weight.main_grad.dtype))
        weight.grad_added_to_main_grad = True
        return torch.empty_like(weight), bgrad  # nobody reads it

    def multiply(self, x: Tensor) -> Any:
        apply, behind = self.use_bias and not self.return_bias, self.parallel_mode == "row"
        out = _Multiply.apply(x, self.weight, self.bias if apply and not behind else None, self)
        if apply and behind:  # after the reduction: by autograd, on this rank's rows
            out = out + self.bias
        return (out, self.bias) if self.return_bias else out


class Linear(_Parallel):
    """As published."""

    def __init__(
        self, in_features: int, out_features: int, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None, rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None, bias: bool = True, return_bias: bool = False,
        params_dtype: torch.dtype | None = None, parallel_mode: str | None = None, parameters_split: Any = None,
        device: Any = "cuda", ub_overlap_ag: bool = False, ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False, ub_bulk_dgrad: bool = False, ub_bulk_wgrad: bool = False,
        ub_name: str | None = None, delay_wgrad_compute: bool = False, symmetric_ar_type: str | None = None,
        save_original_input: bool = False, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.start(delay_wgrad_compute, fuse_wgrad_accumulation, bias)
        self.return_bias, self.save_original_input = return_bias, save_original_input
        self.place(in_features, out_features, tp_group, tp_size, sequence_parallel, parallel_mode)
        self.weights(params_dtype, device, bias, init_method, get_rng_state_tracker, delay_wgrad_compute)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool | None = False) -> Any:
        return self.multiply(inp)


class LayerNormLinear(_Parallel):
    """As published."""

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False, tp_group: Any = None, tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None, init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True, normalization: str = "LayerNorm", return_bias: bool = False,
        params_dtype: torch.dtype | None = None, parallel_mode: str | None = None,
        return_layernorm_output: bool = False, return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None, zero_centered_gamma: bool = False, device: Any = "cuda",
        ub_overlap_ag: bool = False, ub_overlap_rs: bool = False, ub_overlap_rs_dgrad: bool = False,
        ub_bulk_wgrad: bool = False, ub_bulk_dgrad: bool = False, ub_name: str | None = None,
        delay_wgrad_compute: bool = False, symmetric_ar_type: str | None = None, name: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        assert parallel_mode == "column"
        assert normalization in ("LayerNorm", "RMSNorm")
        assert not return_layernorm_output
        self.offset = float(zero_centered_gamma)
        self.start(delay_wgrad_compute, fuse_wgrad_accumulation, bias)
        self.return_bias, self.eps, self.normalization = return_bias, eps, normalization
        self.place(in_features, out_features, tp_group, tp_size, sequence_parallel, parallel_mode)
        first = torch.full((in_features,), 1 - self.offset, dtype=params_dtype, device=device)
        self.layer_norm_weight = torch.nn.Parameter(first)
        self.layer_norm_bias: torch.nn.Parameter | None = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=params_dtype, device=device))
        for weight in (self.layer_norm_weight, self.layer_norm_bias):
            if weight is not None:
                weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.weights(params_dtype, device, bias, init_method, get_rng_state_tracker, delay_wgrad_compute)

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool | None = False) -> Any:
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        return self.multiply(normalise(inp, weight, bias, self.eps, self.offset))


class LayerNormMLP(TransformerEngineBaseModule):
    """Known by name alone: peft asks of each layer whether it is one, and none is built here."""

    def __init__(self, *_: object, **__: object) -> None:
        raise NotImplementedError("the stand-in has no LayerNormMLP, which nothing here builds")


class GroupedLinear(TransformerEngineBaseModule):
    """Of experts; no model of ours has them."""
