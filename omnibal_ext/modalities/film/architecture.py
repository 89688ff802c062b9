"""An encoder of videos as plain data, and which frames of a video it sees."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from omnibal_ext.modalities.encoder import Encoder, EncoderArchitecture
from omnibal_ext.modalities.item import Rule
from omnibal_ext.modalities.modality import FILM, Modality
from omnibal_ext.modalities.place import Mark, Place
from omnibal_ext.modalities.vision.architecture import VisionArchitecture


@dataclass(frozen=True)
class FilmArchitecture(EncoderArchitecture):
    """A ViT that sees frames as square tiles; each of its tokens, the class token included, is one of the language
    model's. The defaults are CLIP's, large, as in Video-LLaVA."""

    patch_size: int = 14
    image_size: int = 224
    norm_epsilon: float = 1e-5
    activation: str = "quick_gelu"

    @classmethod
    def like(cls, vision: VisionArchitecture) -> Self:
        """Return an encoder of videos that has the sizes of this ViT."""
        return cls(**{one.name: getattr(vision, one.name) for one in fields(cls)})

    @property
    def encoder(self) -> Encoder:
        """The encoder as chain, extras and sizes of packs need it; each token of a frame becomes an LLM token."""
        rows = self.as_vit.rows
        return Encoder(FILM, (None,) * self.layers, rows, rows)

    @property
    def as_vit(self) -> VisionArchitecture:
        """This encoder as a ViT for square tiles."""
        sizes = {one.name: getattr(self, one.name) for one in fields(self)}
        return VisionArchitecture(**sizes, patch_bias=False, pre_norm=True, layer_scale=False, pixels="clip")


@dataclass(frozen=True, slots=True)
class Film:
    """One video of a sample.

    `path`: of the video file, or of the first of the frames' files. `place`: set for one inside the input file; `path`
    is its name there. `crcs`: `Mark` of the file, or of each frame's; () if not recorded.
    """

    modality: ClassVar[Modality] = FILM
    path: str
    frames: tuple[int, ...]
    """Numbers in the video of those that are seen; a short video's are seen several times."""
    tokens: int
    """LLM tokens."""
    files: tuple[str, ...] = ()
    """A file for each frame, below the root of media; () for a video file."""
    place: Place = ()
    crcs: tuple[Mark, ...] = ()

    @property
    def units(self) -> int:
        """How many frames are seen: its part of a pack's budget."""
        return len(self.frames)

    @property
    def is_video_file(self) -> bool:
        """Whether frames of a video file are seen; else it is a list of frames' files."""
        return not self.files

    @property
    def runs(self) -> tuple[int, ...]:
        """Length of its one run of tokens in the text."""
        return (self.tokens,)


@dataclass(frozen=True, slots=True)
class FilmRule(Rule):
    """How a video becomes tiles: `frames` of its frames, evenly from the first one on, each cut by a rule of images."""

    modality: ClassVar[Modality] = FILM
    side: int
    """Pixels of a tile."""
    tokens: int
    """LLM tokens of a frame."""
    frames: int = 8
    tiling: str = "crop"
    """A key of `families.media.TILINGS`."""

    @property
    def decides(self) -> tuple[Any, ...]:
        """All fields, as units and tokens depend on all; see `Rule.decides`."""
        return self.side, self.tokens, self.frames, self.tiling

    def __str__(self) -> str:
        """Return the rule as preprocessing prints it."""
        return f"{self.frames} frames of each, spread evenly, {self.tokens} tokens a frame"

    def chosen(self, total: int) -> tuple[int, ...]:
        """Return the numbers of the frames that are seen of `total`: those of torch.arange(0, total, total / frames) as
        integers, as transformers takes them. A short video's repeat."""
        return tuple(frame * total // self.frames for frame in range(self.frames))
