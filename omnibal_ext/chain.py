"""The model as one flat list of layers.

    patch_embed | vit.0 .. vit.n-1 | projector | word_embed | llm.0 .. llm.m-1 | head

Other encoders come first, as audio_embed | audio.0 .. | audio_projector. A chain is the tuple of the layers' kinds; a
layer's id is its index in it.
"""

import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain as joined
from typing import Literal

from omnibal_ext.modalities.modality import ENCODED, IN_CHAIN, LANGUAGE, Modality, Size

KINDS = tuple(joined.from_iterable(one.kinds for one in IN_CHAIN))
"""All kinds of layers, in the order of the chain."""
TOWER_KINDS = KINDS[: KINDS.index(LANGUAGE.kinds[0])]
"""Kinds of layers of encoders: a pack without what they encode skips them."""
_MODALITIES = {kind: one for one in IN_CHAIN for kind in one.kinds}
RECOMPUTABLE_KINDS = tuple(one.kinds[1] for one in IN_CHAIN)
_WITHOUT_WEIGHTS = {one.kinds[2] for one in ENCODED if one.projected_by}
ADAPTABLE_KINDS = (
    *(kind for one in ENCODED for kind in one.kinds[1:] if kind not in _WITHOUT_WEIGHTS), LANGUAGE.kinds[1]
)  # fmt: skip
"""Kinds whose linear layers get adapters if their part is among the targets."""
PARTS = {
    "vit": tuple(kind for one in ENCODED for kind in one.kinds if kind != one.kinds[2] or kind in _WITHOUT_WEIGHTS),
    "projector": tuple(one.kinds[2] for one in ENCODED if one.kinds[2] not in _WITHOUT_WEIGHTS),
    "llm": LANGUAGE.kinds,
}
"""Parts of a model that can be frozen, and the kinds of layers in each: any encoder is treated as the ViT."""
PART_OF = {kind: part for part, kinds in PARTS.items() for kind in kinds}
TIMED_PART_OF = {**PART_OF, "head": "head"}
"""The part of each kind in timelines: as in `PART_OF`, with the head as a part of its own."""
AS_LAYERS = {PART_OF[one.kinds[2]]: PART_OF[one.kinds[1]] for one in ENCODED if not one.projected_by}
"""A projector's part -> that of its encoder's layers, where they are measured together."""
VISION_NORM = "vision_norm"
"""Name of the ViT's last norm, if any: the first module of the projector's layer, but of the part "vit"."""
GradientMode = Literal["trained", "adapted", "frozen", "idle"]


def layer_chain(layers: Mapping[Modality, int]) -> tuple[str, ...]:
    """Return the kinds of all layers of a model; `layers`: how many lie between the ends, for each of its
    modalities."""
    kinds = [(one.kinds, layers[one]) for one in IN_CHAIN if one in layers]
    return tuple(joined.from_iterable((first, *[layer] * count, last) for (first, layer, last), count in kinds))


def gradient_mode(kind: str, frozen_parts: Iterable[str], adapted_parts: Collection[str] = ()) -> GradientMode:
    """Return what the backward computes in a layer of that kind if some parts (vit, projector, llm) are frozen or
    adapted.

    "trained": gradients of weights and inputs. "adapted": of adapters and inputs. "frozen": of inputs only, which
    earlier trained layers need. "idle": nothing, as no earlier layer is trained; nothing is kept for a backward.
    """
    frozen = {kind for part in frozen_parts for kind in PARTS[part]}
    adapted = {kind for kind in ADAPTABLE_KINDS if PART_OF[kind] in adapted_parts}
    kind = chain_kind(kind)
    if kind in adapted:
        return "adapted"
    if kind not in frozen:
        return "trained"
    modality = modality_of(kind)
    seen = KINDS if modality is LANGUAGE else modality.kinds
    earlier = seen[: seen.index(kind)]
    return "frozen" if any(other not in frozen or other in adapted for other in earlier) else "idle"


def cost_kinds(chain: Sequence[str], separate: Mapping[str, Collection[int]]) -> tuple[str, ...]:
    """Return the key of every layer's costs: its kind, or the key of `separate` that lists its number among the kind's
    layers."""
    names = {(chain_kind(name), number): name for name, layers in separate.items() for number in layers}
    return tuple(names.get((kind, number), kind) for kind, number in numbered(chain))


def numbered(chain: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield every layer's kind, and its number among the layers of that kind."""
    seen = Counter[str]()
    for kind in chain:
        yield kind, seen[kind]
        seen[kind] += 1


def separate_layers(chain: Sequence[str], layers: Sequence[Hashable]) -> dict[str, tuple[int, ...]]:
    """Return the layers that differ from the first of their kind: {first one's name, such as "llm.3": numbers within
    the kind of all that equal it}. `layers`: a value for each layer of the chain; equal values cost the same."""
    names: dict[tuple[str, Hashable], str] = {}
    found: dict[str, list[int]] = {}
    for (kind, number), layer in zip(numbered(chain), layers, strict=True):
        name = names.setdefault((kind, layer), f"{kind}.{number}" if number else kind)
        if name != kind:
            found.setdefault(name, []).append(number)
    return {name: tuple(numbers) for name, numbers in found.items()}


def chain_kind(name: str) -> str:
    """Return the kind of layer of a cost key: "llm" of "llm.3", and of "llm_linear" in older profiles."""
    return name if name in KINDS else re.split("[._]", name)[0]


def modality_of(name: str) -> Modality:
    """Return the modality (vision, language, ...) of the layers with this cost key, such as "llm.3"."""
    return _MODALITIES[chain_kind(name)]


def size_of(name: str) -> Size:
    """Return the size of a pack (tiles, tokens, ...) with which the work of layers with this cost key grows."""
    return modality_of(name).size


def sizes_of(chain: Sequence[str]) -> tuple[Size, ...]:
    """Return the sizes of a pack (tiles, tokens, ...) with which the work of these layers grows, in the chain's
    order."""
    return tuple(dict.fromkeys(map(size_of, chain)))


def layer_names(chain: Sequence[str]) -> tuple[str, ...]:
    """Return a readable name for each layer: "patch_embed", "vit.0", "vit.1", ..., "head"."""
    return tuple(f"{kind}.{number}" if kind in RECOMPUTABLE_KINDS else kind for kind, number in numbered(chain))
