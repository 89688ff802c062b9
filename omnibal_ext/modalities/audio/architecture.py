"""An audio encoder as plain data: the sizes that the planner prices, and what the trainer builds from them."""

from dataclasses import dataclass

from omnibal_ext.modalities.encoder import Encoder, EncoderArchitecture
from omnibal_ext.modalities.modality import AUDIO
from omnibal_ext.modalities.vision.architecture import NativeResolution, VisionArchitecture


@dataclass(frozen=True)
class AudioArchitecture(EncoderArchitecture):
    """An encoder of log-mel spectrograms after Whisper's. The defaults are Qwen2.5-Omni's.

    Convolutions turn chunks of `chunk` mel frames into rows, with sinusoidal positions that begin anew in each chunk;
    rows of `chunks_attended` chunks of a sound attend to each other. The projector makes LLM tokens of them.
    """

    mel_bins: int = 128
    chunk: int = 200
    """Mel frames that are convolved together."""
    chunks_attended: int = 1
    channels: int = 0
    """Channels of three convolutions over time and frequency, 8 frames a row (Qwen3-Omni); 0: two convolutions over
    time, 2 frames a row (Qwen2.5-Omni)."""
    pooled: bool = True
    """The projector averages pairs of rows, followed by a norm and one matrix; else a norm and a two-layer MLP."""
    key_bias: bool = False
    activation: str = "gelu"

    @property
    def encoder(self) -> Encoder:
        """The encoder as chain, extras and sizes of packs need it: its layers, and rows and tokens of a sound."""
        return Encoder(AUDIO, (None,) * self.layers, self.rows, self.tokens, period=self.period)

    @property
    def as_vit(self) -> VisionArchitecture:
        """A ViT at native resolution with the same layers, by which their work is counted."""
        return VisionArchitecture(
            self.layers, self.hidden_size, self.heads, self.ffn_hidden_size, norm_epsilon=1e-5, class_token=False,
            activation=self.activation, layer_scale=False, native=NativeResolution(),
        )  # fmt: skip

    @property
    def period(self) -> int:
        """Mel frames of all chunks whose rows attend to each other."""
        return self.chunk * self.chunks_attended

    @property
    def halvings(self) -> int:
        """Number of convolutions with stride 2."""
        return 3 if self.channels else 1

    def rows(self, frames: int) -> int:
        """Return how many rows the encoder's layers see of a sound of `frames` mel frames."""
        whole, rest = divmod(frames, self.chunk)
        return whole * self.halved(self.chunk) + self.halved(rest)

    def tokens(self, frames: int) -> int:
        """Return how many LLM tokens a sound of `frames` mel frames becomes."""
        rows = self.rows(frames)
        return rows // 2 if self.pooled else rows

    def chunks(self, frames: int) -> list[int]:
        """Return the mel frames of each chunk of a sound of `frames`; the last one may be shorter."""
        whole, rest = divmod(frames, self.chunk)
        return [self.chunk] * whole + ([rest] if rest else [])

    def windows(self, frames: int) -> list[int]:
        """Return, of a sound of `frames` mel frames, the rows in each group of chunks that attend to each other."""
        rows, most = self.rows(frames), self.halved(self.chunk) * self.chunks_attended
        whole, rest = divmod(rows, most)
        return [most] * whole + ([rest] if rest else [])

    def halved(self, frames: int) -> int:
        """Return how long an axis (time, mel bins) of this length is behind the convolutions with stride 2."""
        for _ in range(self.halvings):
            frames = (frames + 1) // 2
        return frames
