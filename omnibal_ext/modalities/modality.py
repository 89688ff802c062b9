"""The registry of modalities: how chains, files and flags name what a model reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Size = str
"""What a pack has a budget of: "tiles", "frames", "tokens"."""
Budgets = Mapping[Size, int]
"""Most units of each size in a pack."""


@dataclass(frozen=True, slots=True)
class Modality:
    """One kind of input. All but `LANGUAGE` have an encoder, whose output becomes tokens of the language model."""

    name: str
    """Name in files of costs and in --tower."""
    size: Size
    """Size of packs with which the work of its layers grows."""
    kinds: tuple[str, str, str]
    """Kinds of its layers in a chain: what embeds, a layer, what follows the layers."""
    units: str
    """What messages call the size's units."""
    budget: str
    """The budget's key in files; its flag is --NAME with hyphens."""
    inputs: str
    """What messages and datasets call its inputs."""
    mark: str
    """Mark of an input in a conversation's text; what is between <> is the type of a part of a message."""
    verb: str
    """What models do that have it: they "hear"."""
    priced_by: str = ""
    """Model by which packs with a further modality are priced, where none is named."""
    typical: int = 1
    """Units that an input is taken to have where nothing says how many."""
    projected_by: "Modality | None" = None
    """Modality behind a further one in the chain whose projector makes tokens of its rows, a token each; its own last
    layer then has no weights. None: its last layer makes tokens."""

    def __hash__(self) -> int:
        """Return the hash of the name, which is quick: a modality is the key of many mappings."""
        return hash(self.name)

    @property
    def rate(self) -> str:
        """Key in plans, such as "tiles_per_frame", of the time that one of its units takes to encode, in tiles'."""
        return f"tiles_per_{self.size.removesuffix('s')}"

    @property
    def dist_ratio(self) -> str:
        """Key in files of the DistRatio of its size: "dist_ratio_vit"."""
        return f"dist_ratio_{self.budget.removesuffix('_budget')}"


VISION = Modality(
    "vision", "tiles", ("patch_embed", "vit", "projector"), "tiles", "vit_budget", "images", "<image>", "see"
)
LANGUAGE = Modality("language", "tokens", ("word_embed", "llm", "head"), "tokens", "llm_budget", "words", "", "read")
AUDIO = Modality(
    "audio", "frames", ("audio_embed", "audio", "audio_projector"), "mel frames", "audio_budget", "sounds",
    "<audio>", "hear", "qwen2.5-omni-7b", typical=1000,  # ten seconds
)  # fmt: skip
FILM = Modality(
    "film", "stills", ("film_embed", "film", "film_projector"), "frames of videos", "film_budget", "videos", "<video>",
    "watch", "video-llava-7b", typical=8, projected_by=VISION,
)  # fmt: skip
MODALITIES = (VISION, LANGUAGE, AUDIO, FILM)
"""All modalities, in the order in which files and tables list them; a new one comes last."""
ALWAYS = (VISION, LANGUAGE)
"""Modalities whose budgets are in every file; those of others only where there are any."""
FURTHER = tuple(one for one in MODALITIES if one not in ALWAYS)
"""Modalities that are not in `ALWAYS`."""
FURTHER_SIZES = tuple(one.size for one in FURTHER)
ENCODED = tuple(one for one in reversed(MODALITIES) if one is not LANGUAGE)
"""Modalities with an encoder, in the order of the chain."""
IN_CHAIN = (*ENCODED, LANGUAGE)
"""All modalities, in the order of the chain."""


def budgets_in(record: Mapping[str, Any]) -> Budgets:
    """Return {size: budget} of a record, or of a program's arguments, which have each under its name; without zeros."""
    return {one.size: record[one.budget] for one in MODALITIES if record.get(one.budget)}


def budget_fields(budgets: Budgets) -> dict[str, int]:
    """Return budgets by their names in files ("vit_budget", ...): tiles' and tokens' always, 0 if not there."""
    return {one.budget: budgets.get(one.size, 0) for one in MODALITIES if one in ALWAYS or one.size in budgets}


def with_budget_keys(record: Mapping[str, Any], behind: str) -> dict[str, Any]:
    """Return a record with its "budgets" by name: tiles' and tokens' in that place, others after the field `behind`."""
    keys = budget_fields(record["budgets"])
    always = {one.budget: keys.pop(one.budget) for one in ALWAYS}
    return in_place(record, {"budgets": always, behind: {behind: record[behind], **keys}})


def in_place(record: Mapping[str, Any], fields: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a record in which fields that are keys of `fields` are replaced, in place, by what it has for them."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        found |= fields.get(name, {name: value})
    return found


def in_words(budgets: Budgets, between: str = ", ") -> str:
    """Return budgets as text for people: "12 tiles, 4,096 tokens, 3,000 mel frames"."""
    return between.join(f"{budgets[one.size]:,} {one.units}" for one in MODALITIES if one.size in budgets)
