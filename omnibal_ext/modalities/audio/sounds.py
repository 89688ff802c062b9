"""What a model hears of a sound, as numbers: its mel frames and tokens."""

from dataclasses import dataclass
from typing import Any, ClassVar

from omnibal_ext.modalities.audio.architecture import AudioArchitecture
from omnibal_ext.modalities.item import Rule
from omnibal_ext.modalities.modality import AUDIO, Modality
from omnibal_ext.modalities.place import Mark, Place


@dataclass(frozen=True, slots=True)
class Sound:
    """One sound of a sample: its path below the root of media, and what the model hears of it.

    `place`: set for a sound inside the input file; `path` is its name there. `crcs`: `Mark` of the file, or ().
    """

    modality: ClassVar[Modality] = AUDIO
    is_video_file: ClassVar[bool] = False
    files: ClassVar[tuple[str, ...]] = ()
    path: str
    samples: int
    """Samples of the whole sound, at the model's rate."""
    frames: int
    """Mel frames."""
    tokens: int
    """LLM tokens."""
    place: Place = ()
    crcs: tuple[Mark, ...] = ()
    video: int = -1
    """Number of the sample's image (a video) whose own sound it is; -1: a sound alone."""
    turns: tuple[int, ...] = ()
    """Lengths of alternating runs of a video's tokens and of its own sound's (`token_turns`)."""

    @property
    def units(self) -> int:
        """Mel frames: its part of a pack's budget."""
        return self.frames

    @property
    def runs(self) -> tuple[int, ...]:
        """Lengths of the runs of its tokens in the text: several if they take turns with its video's."""
        return self.turns[1::2] or (self.tokens,)


@dataclass(frozen=True, slots=True)
class SoundRule(Rule):
    """How a model hears: what its feature extractor does, and its encoder."""

    modality: ClassVar[Modality] = AUDIO
    encoder: AudioArchitecture
    rate: int = 16000
    """Samples a second."""
    window: int = 400
    """Samples that a frame sees."""
    hop: int = 160
    """Samples from one frame to the next."""
    longest: int | None = None
    """Seconds that are heard, from the beginning; shorter sounds are padded with silence, which their last frames see.
    None: everything is heard, and the last frames see the end mirrored."""

    @property
    def decides(self) -> tuple[Any, ...]:
        """All values on which mel frames and tokens depend; see `Rule.decides`."""
        one = self.encoder
        return self.rate, self.window, self.hop, self.longest, one.mel_bins, one.chunk, one.channels, one.pooled

    def __str__(self) -> str:
        """Return the rule as preprocessing prints it."""
        heard = "all of it" if self.longest is None else f"the first {self.longest} seconds"
        return f"{self.rate} samples a second, {self.rate / self.hop:g} frames, {heard}"

    def heard(self, samples: int) -> int:
        """Return how many of a sound's samples the model hears: all, or the first `longest` seconds."""
        return samples if self.longest is None else min(samples, self.longest * self.rate)

    def frames(self, samples: int) -> int:
        """Return how many mel frames a sound of so many samples has; 0 if it is too short."""
        if self.longest is not None:
            return -(-self.heard(samples) // self.hop)
        return samples // self.hop if samples > self.window // 2 else 0

    def tokens(self, samples: int) -> int:
        """Return how many LLM tokens a sound of so many samples becomes; 0 if it is too short."""
        frames = self.frames(samples)
        return self.encoder.tokens(frames) if frames else 0
