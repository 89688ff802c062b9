"""The model as one flat list of layers.

    patch_embed | vit.0 .. vit.n-1 | projector | word_embed | llm.0 .. llm.m-1 | head

A chain is the tuple of the layers' kinds; a layer's id is its place in it.
"""

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Literal

KINDS = ("patch_embed", "vit", "projector", "word_embed", "llm", "head")
VISION_KINDS = ("patch_embed", "vit", "projector")
"""Kinds whose work grows with a pack's tiles; the others' grows with its tokens."""
TOWER_KINDS = VISION_KINDS
"""Kinds of towers' links: they pass a pack by that has nothing to encode."""
RECOMPUTABLE_KINDS = ("vit", "llm")
ADAPTABLE_KINDS = ("vit", "projector", "llm")
"""Kinds whose linear layers get adapters where their part has them."""
PARTS = {"vit": ("patch_embed", "vit"), "projector": ("projector",), "llm": ("word_embed", "llm", "head")}
"""The parts of a model that people freeze, and the kinds of layers in each."""
PART_OF = {kind: part for part, kinds in PARTS.items() for kind in kinds}
TIMED_PART_OF = {**PART_OF, "head": "head"}
"""What timelines tell apart: these parts, and the head from the other language layers."""
VISION_NORM = "vision_norm"
"""The ViT's last norm, where a model has one. It lies in the projector's link, at its front, and is of the ViT."""
GradientMode = Literal["trained", "adapted", "frozen", "idle"]


def layer_chain(vit_layers: int, llm_layers: int) -> tuple[str, ...]:
    """The kinds of all layers of a model with so many ViT and LLM layers."""
    return ("patch_embed", *["vit"] * vit_layers, "projector", "word_embed", *["llm"] * llm_layers, "head")


def gradient_mode(kind: str, frozen_parts: Iterable[str], adapted_parts: Collection[str] = ()) -> GradientMode:
    """What the backward pass does in a layer of that kind when some of `PARTS` are frozen, and some have adapters.

    "trained": gradients of weights and inputs. "adapted": of adapters and inputs. "frozen": of inputs only, for
    something before it is trained. "idle": nothing up to here is trained, so there is no backward work and nothing is
    kept for one.
    """
    frozen = {kind for part in frozen_parts for kind in PARTS[part]}
    adapted = {kind for kind in ADAPTABLE_KINDS if PART_OF[kind] in adapted_parts}
    kind = chain_kind(kind)
    if kind in adapted:
        return "adapted"
    if kind not in frozen:
        return "trained"
    earlier = KINDS[: KINDS.index(kind)]
    return "frozen" if any(other not in frozen or other in adapted for other in earlier) else "idle"


def cost_kinds(chain: Sequence[str], separate: Mapping[str, Collection[int]]) -> tuple[str, ...]:
    """What the costs of every layer stand under: its kind, or the name in `separate` that has its number among those
    of its kind in the chain."""
    names = {(chain_kind(name), number): name for name, layers in separate.items() for number in layers}
    seen, kinds = Counter[str](), []
    for kind in chain:
        kinds.append(names.get((kind, seen[kind]), kind))
        seen[kind] += 1
    return tuple(kinds)


def separate_layers(chain: Sequence[str], layers: Sequence[Hashable]) -> dict[str, tuple[int, ...]]:
    """Layers that cost otherwise than the first of their kind, as `cost_kinds` reads them: equal ones under the name of
    the first of them ("llm.3"). `layers`: a value for each layer of the chain."""
    names: dict[tuple[str, Hashable], str] = {}
    found: dict[str, list[int]] = {}
    seen = Counter[str]()
    for kind, layer in zip(chain, layers, strict=True):
        name = names.setdefault((kind, layer), f"{kind}.{seen[kind]}" if seen[kind] else kind)
        if name != kind:
            found.setdefault(name, []).append(seen[kind])
        seen[kind] += 1
    return {name: tuple(numbers) for name, numbers in found.items()}


def chain_kind(name: str) -> str:
    """The kind in the chain of layers whose costs stand under `name`: "llm.3" is an "llm", and so is "llm_linear" of
    older profiles."""
    return name if name in KINDS else re.split("[._]", name)[0]


def layer_names(chain: Sequence[str]) -> tuple[str, ...]:
    """Names as people say them: "patch_embed", "vit.0", "vit.1", ..., "head"."""
    seen: Counter[str] = Counter()
    names = []
    for kind in chain:
        names.append(f"{kind}.{seen[kind]}" if kind in RECOMPUTABLE_KINDS else kind)
        seen[kind] += 1
    return tuple(names)
