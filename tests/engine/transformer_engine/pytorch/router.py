"""Kernels of a router; no model of ours has one."""


def _missing(*_: object, **__: object) -> None:
    raise NotImplementedError


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function = _missing
