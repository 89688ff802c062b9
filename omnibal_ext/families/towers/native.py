"""What ViTs at native resolution have alike in a config.json: activations, heads, a rotation in two dimensions."""

from omnibal_ext.errors import UserError
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.llama import BASE, ROPE
from omnibal_ext.reading.checks import integer

ACTIVATIONS = {one: one for one in ("silu", "quick_gelu", "gelu")} | {"gelu_pytorch_tanh": "gelu_tanh"}
SIDE = integer(1, 2**14)


def check_heads(tower: Section, width: int, heads: int) -> None:
    """Raise UserError where row and column do not each turn pairs of a head's numbers."""
    if width % (4 * heads):
        raise UserError(f"{tower.where}: {width} does not divide into {heads} heads whose width is a multiple of 4")


def rotary_base(tower: Section) -> float:
    """Of rows and columns. Raises UserError for another rotation."""
    rope = tower.take_if("rope_parameters", ROPE) or {}
    kind = rope.get("rope_type") or rope.get("type") or "axial"
    if kind not in ("axial", "default"):
        raise UserError(f"{tower.where}.rope_parameters has rope type {kind!r}; supported: 'axial'")
    return float(rope.get("rope_theta") or tower.take_if("rope_theta", BASE) or 1e4)
