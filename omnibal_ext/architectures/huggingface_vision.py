"""Reads the sizes of a ViT that sees square tiles: InternViT, CLIP, SigLIP."""

from typing import Any

from omnibal_ext.architectures.huggingface_language import EPSILON, HEADS, WIDTH
from omnibal_ext.architectures.huggingface_section import Section
from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import listing, whole

ACTIVATIONS = {"gelu": "gelu", "quick_gelu": "quick_gelu", "gelu_pytorch_tanh": "gelu_tanh"}
SIDE = whole(1, 2**14)


def vision_sizes(tower: Section, layers: int) -> dict[str, Any]:
    """Fields of a `VisionArchitecture`, `layers` of which run. Raises UserError naming what cannot be honoured."""
    tower.must(num_channels=3, attention_dropout=0.0, hidden_dropout_prob=0.0, projection_dropout=0.0, dropout=0.0)
    hidden_size, heads = tower.take("hidden_size", WIDTH), tower.take("num_attention_heads", HEADS)
    if hidden_size % heads:
        raise UserError(f"{tower.where}: hidden_size {hidden_size} does not divide into {heads} heads")
    return {
        "layers": layers,
        "hidden_size": hidden_size,
        "heads": heads,
        "ffn_hidden_size": tower.take("intermediate_size", WIDTH),
        "image_size": _side(tower, "image_size"),
        "patch_size": _side(tower, "patch_size"),
        "norm_epsilon": tower.take("layer_norm_eps", EPSILON),
        "activation": tower.choose("hidden_act", ACTIVATIONS),
    }


def _side(tower: Section, name: str) -> int:
    """A square's side, written as a number or as height and width."""
    sides = tower.take(name, listing(SIDE, 2, 2)) if isinstance(tower[name], list) else [tower.take(name, SIDE)]
    if len(set(sides)) != 1:
        raise UserError(f"{tower.where}.{name} is {sides}; only squares are supported")
    return sides[0]
