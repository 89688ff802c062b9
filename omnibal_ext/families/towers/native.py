"""Fields that ViTs at native resolution share: sizes, activations, 2D RoPE."""

from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.rotation import ROPE

ACTIVATIONS = {one: one for one in ("silu", "quick_gelu", "gelu")} | {"gelu_pytorch_tanh": "gelu_tanh"}


def native_sizes(
    tower: Section, layers: str = "depth", width: str = "hidden_size", heads: str = "num_heads"
) -> dict[str, Any]:
    """Return what every ViT at native resolution has for its `VisionArchitecture`; arguments: names in config.json.

    Raises UserError unless a head's width is a multiple of 4: rows and columns rotate pairs of dimensions each.
    """
    size, count, patch = tower.take(width), tower.take(heads), tower.take("patch_size")
    if size % (4 * count):
        raise UserError(f"{tower.where}: {size} does not divide into {count} heads whose width is a multiple of 4")
    depth = tower.take(layers)
    shape = {"layers": depth, "hidden_size": size, "heads": count, "patch_size": patch, "image_size": patch}
    return {**shape, "layer_scale": False}


def rotary_base(tower: Section) -> float:
    """Return the base of RoPE over rows and columns. Raises UserError for another RoPE type."""
    rope = tower.take_if("rope_parameters", ROPE) or {}
    kind = rope.get("rope_type") or rope.get("type") or "axial"
    if kind not in ("axial", "default"):
        raise UserError(f"{tower.where}.rope_parameters has rope type {kind!r}; supported: 'axial'")
    base = tower.take_if("rope_theta")  # outside `rope_parameters` too
    return float(rope.get("rope_theta") or base or 1e4)
