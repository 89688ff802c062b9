"""The settings of preprocessing."""

from dataclasses import dataclass
from pathlib import Path

from megatron.vlm.data.media.images import MAX_PIXELS
from megatron.vlm.data.media.tiles import Tiling
from omnibal_ext.families.towers.video_rules import VideoRule
from omnibal_ext.modalities.item import Rule
from omnibal_ext.modalities.modality import Modality
from omnibal_ext.modalities.vision.architecture import VideoClock


@dataclass(frozen=True, slots=True)
class Recipe:
    """All settings that decide a sample: the same recipe and input give the same bytes."""

    image_root: Path | None  # base of image paths; None: each input file's folder
    tokenizer: Path
    template: str  # a name of `TEMPLATES`, or a file
    tiling: Tiling
    tokens_per_tile: float = 256  # image tokens per ViT tile; below 1 if tiles are patches
    max_tokens: int | None = None  # longer samples are shortened or rejected
    shorten: tuple[str, ...] = ()  # of `SHORTENINGS`, in the order in which they are tried
    max_pixels: int = MAX_PIXELS
    decode_images: bool = False  # decode every image and sound, not headers only
    image_checksums: bool = True  # record the CRC-32 of every file
    system_message: str | None = None  # the default one; None: the template's, "": none
    normalization: str = "imagenet"  # a name of `NORMALIZATIONS`
    markup: str = "internvl"  # a name of `MARKUPS`
    video: VideoRule | None = None  # None: the model does not see videos
    further: tuple[Rule, ...] = ()  # how inputs beyond images are read: one of each modality that the model takes
    clock: VideoClock | None = None  # how a video and its own sound take turns; None: the model does not hear videos
    use_audio_in_video: bool = False  # hear the sound of videos, where a record does not say

    @property
    def rules(self) -> dict[Modality, Rule]:
        """Rules by which sounds and separately encoded videos are read, by modality."""
        return {rule.modality: rule for rule in self.further}
