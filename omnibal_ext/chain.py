"""The model as one flat list of layers.

    patch_embed | vit.0 .. vit.n-1 | projector | word_embed | llm.0 .. llm.m-1 | head

A chain is the tuple of the layers' kinds; a layer's id is its place in it.
"""

from collections import Counter
from collections.abc import Sequence

KINDS = ("patch_embed", "vit", "projector", "word_embed", "llm", "head")
VISION_KINDS = ("patch_embed", "vit", "projector")
"""Kinds whose work grows with a pack's tiles; the others' grows with its tokens."""
RECOMPUTABLE_KINDS = ("vit", "llm")


def layer_chain(vit_layers: int, llm_layers: int) -> tuple[str, ...]:
    """The kinds of all layers of a model with so many ViT and LLM layers."""
    return ("patch_embed", *["vit"] * vit_layers, "projector", "word_embed", *["llm"] * llm_layers, "head")


def layer_names(chain: Sequence[str]) -> tuple[str, ...]:
    """Names as people say them: "patch_embed", "vit.0", "vit.1", ..., "head"."""
    seen: Counter[str] = Counter()
    names = []
    for kind in chain:
        names.append(f"{kind}.{seen[kind]}" if kind in RECOMPUTABLE_KINDS else kind)
        seen[kind] += 1
    return tuple(names)
