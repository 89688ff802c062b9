"""Language models with more or fewer layers, or with other fields in all of them or some."""

from collections.abc import Collection
from dataclasses import fields, replace
from itertools import cycle, islice
from typing import Any

from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.layer import Attention, Layer


def with_layers(language: LanguageArchitecture, count: int) -> LanguageArchitecture:
    """The model with so many of its layers, from the first one again where it has fewer."""
    return replace(language, each_layer=tuple(islice(cycle(language.each_layer), count)))


def altered(
    language: LanguageArchitecture, only: Collection[int] | None = None, **changes: Any
) -> LanguageArchitecture:
    """The model with these fields changed: its own, its layers', their attention's and its rotation's.

    `only`: in these layers alone."""
    known = set(changes)

    def changed(part: Any, **more: Any) -> Any:
        own = {one.name for one in fields(part)} & changes.keys()
        known.difference_update(own)
        return replace(part, **more, **{name: changes[name] for name in own})

    def layer(one: Layer) -> Layer:
        if isinstance(mixer := one.mixer, Attention) and "mixer" not in changes:
            one = replace(one, mixer=changed(mixer, rope=changed(mixer.rope)))
        return changed(one)

    layers = (layer(one) if only is None or n in only else one for n, one in enumerate(language.each_layer))
    found = changed(language, each_layer=tuple(layers))
    assert not known, f"there is no such field: {known}"
    return found
