"""The registry of modalities: how chains, files and flags name what a model reads."""

from dataclasses import dataclass

Size = str
"""What a pack has a budget of: "tiles", "frames", "tokens"."""


@dataclass(frozen=True, slots=True)
class Modality:
    """One kind of input. All but `LANGUAGE` have an encoder, whose output becomes tokens of the language model."""

    name: str
    """In files of costs and in --tower."""
    size: Size
    """With which the work of its layers grows."""
    kinds: tuple[str, str, str]
    """Kinds of its links in a chain: what embeds, a layer, what follows the layers."""
    budget: str
    """The budget's key in files; its flag is --NAME with hyphens."""


VISION = Modality("vision", "tiles", ("patch_embed", "vit", "projector"), "vit_budget")
LANGUAGE = Modality("language", "tokens", ("word_embed", "llm", "head"), "llm_budget")
AUDIO = Modality("audio", "frames", ("audio_embed", "audio", "audio_projector"), "audio_budget")
MODALITIES = (VISION, LANGUAGE, AUDIO)
"""In the order in which files and tables list them; a new one comes last."""
ENCODED = tuple(one for one in reversed(MODALITIES) if one is not LANGUAGE)
"""Those with an encoder, in the order of the chain."""
