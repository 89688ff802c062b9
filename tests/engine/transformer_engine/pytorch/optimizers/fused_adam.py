"""Adam, of whose states each may have a precision of its own.

A weight in fp32 is, beside the one in bf16, the half of its bits that bf16 lacks (`store_param_remainders`). Other
states that are not fp32 are scaled by their largest number, but for those in bf16.
"""

from collections.abc import Iterable
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor

KEPT = {torch.uint8: torch.float8_e4m3fn}
"""Of a precision that is asked for, what is kept in it."""
RANGES = {torch.float16: torch.finfo(torch.float16).max / 2, torch.uint8: 448.0}


class FusedAdam(torch.optim.Optimizer):
    """As published; `capturable` is left out."""

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, bias_correction: bool = True, adam_w_mode: bool = True,
        capturable: bool = False, master_weights: bool = False, master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32, exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False, store_param_remainders: bool = False, set_grad_none: bool | None = None,
    ) -> None:  # fmt: skip
        assert (amsgrad, capturable, set_grad_none, bias_correction) == (False, False, None, True)
        defaults = {"lr": lr, "bias_correction": True, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self.adam_w_mode, self.master_weights = adam_w_mode, master_weights
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype
        }  # fmt: skip
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights and master_weight_dtype == torch.float32
        self._scales: dict[Any, dict[str, Tensor]] = {}

    def _is_remainder(self, param: Tensor, name: str) -> bool:
        return self.store_param_remainders and name == "master_param" and param.dtype == torch.bfloat16

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        names = ("exp_avg", "exp_avg_sq", *(("master_param",) if self.master_weights else ()))
        for name in names:
            self._initialize_state(param, name)
        if self.master_weights and not store_param_remainders:
            self.set_scaled_state(param, "master_param", param.clone().detach().float())

    def _initialize_state(self, param: Tensor, name: str) -> None:
        dtype = self.name_to_dtype_map[name]
        kept = torch.int16 if self._is_remainder(param, name) else KEPT.get(dtype, dtype)
        self.state[param][name] = torch.zeros_like(param, dtype=kept)
        self._scales.setdefault(param, {})[name] = torch.ones((1,), device=param.device)

    def get_unscaled_state(self, param: Tensor, state_name: str, skip_unscale: bool = False) -> Tensor:
        state = self.state[param][state_name]
        if self._is_remainder(param, state_name) or state.dtype == torch.float32:
            return state
        return state.float() * self._scales[param][state_name]

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        remainder, dtype = self._is_remainder(param, state_name), self.name_to_dtype_map[state_name]
        assert unscaled_state.dtype == (torch.int16 if remainder else torch.float32)
        if state_name not in self.state[param]:
            self._initialize_state(param, state_name)
        scale = self._scales[param][state_name]
        if dtype in RANGES:
            scale.copy_((unscaled_state.abs().amax() / RANGES[dtype]).clamp(min=1e-30))
        state = self.state[param][state_name]
        state.copy_(unscaled_state if remainder else (unscaled_state / scale).to(state.dtype))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for number, param in enumerate(chain.from_iterable(group["params"] for group in self.param_groups)):
            if number in state["state"]:
                state["state"][number] = {name: self.get_unscaled_state(param, name) for name in self.state[param]}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in deepcopy(state_dict["param_groups"]))
        for number, param in zip(saved, chain.from_iterable(g["params"] for g in self.param_groups), strict=True):
            if number not in state_dict["state"]:
                continue
            self.state[param] = {}
            for name, value in state_dict["state"][number].items():
                if value is not None:
                    self.set_scaled_state(param, name, value if self._is_remainder(param, name) else value.float())

    @torch.no_grad()
    def step(self, closure: Any = None, grad_scaler: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, self._is_remainder(param, "master_param"))
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is not None:
                    self._step(param, grad.float(), group)

    def _step(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        (first, second), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        mean, square = (self.get_unscaled_state(param, name) for name in ("exp_avg", "exp_avg_sq"))
        has_master = self.master_weights and param.dtype != torch.float32
        weight = self._master(param) if has_master else param
        grad = grad if self.adam_w_mode else grad + decay * weight
        mean, square = mean.lerp(grad, 1 - first), second * square + (1 - second) * grad * grad
        root = (square / (1 - second ** group["step"])).sqrt() + group["eps"]
        weight = weight - lr * (mean / (1 - first ** group["step"]) / root + decay * weight * self.adam_w_mode)
        for name, value in (("exp_avg", mean), ("exp_avg_sq", square)):
            self.set_scaled_state(param, name, value)
        if not has_master:
            param.copy_(weight)
        elif self._is_remainder(param, "master_param"):
            bits = weight.view(torch.int32)
            rest = (bits & 0xFFFF).to(torch.int16)
            self.state[param]["master_param"].copy_(rest)
            param.copy_(((bits >> 16) + (rest < 0).int()).to(torch.int16).view(torch.bfloat16))
        else:
            self.set_scaled_state(param, "master_param", weight)
            param.copy_(weight)

    def _master(self, param: Tensor) -> Tensor:
        """The weight in fp32."""
        state = self.get_unscaled_state(param, "master_param")
        if not self._is_remainder(param, "master_param"):
            return state
        high = param.view(torch.int16).to(torch.int32) - (state < 0).int()
        return ((high << 16) | (state.to(torch.int32) & 0xFFFF)).view(torch.float32)
