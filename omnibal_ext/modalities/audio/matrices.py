"""The matrices of an audio encoder's layers, and of its projector."""

from typing import TYPE_CHECKING

from omnibal_ext.modalities.audio.architecture import AudioArchitecture
from omnibal_ext.modalities.matrix import APART, Matrix, Stored, perceptron

if TYPE_CHECKING:
    from omnibal_ext.architectures.architecture import Architecture


def matrices(model: "Architecture", ranks: int, stored: Stored = APART) -> dict[str, tuple[Matrix, ...]]:
    """Return the matrices in one layer of each kind, by cost key, heads padded for `ranks` tensor-parallel ranks."""
    audio = AudioArchitecture.among(model.further)
    return {"audio": _layer(audio, ranks), "audio_projector": _projector(audio, model.language.hidden_size)}


def _layer(audio: AudioArchitecture, ranks: int) -> tuple[Matrix, ...]:
    width, head = audio.hidden_size, audio.hidden_size // audio.heads
    heads = head * audio.as_vit.heads_over(ranks)
    return (
        Matrix("self_attention.linear_qkv", 3 * heads, width, (head,) * 3),
        Matrix("self_attention.linear_proj", width, heads, by_rows=True),
        *perceptron("mlp.", width, audio.ffn_hidden_size, gated=False),
    )


def _projector(audio: AudioArchitecture, out: int) -> tuple[Matrix, ...]:
    width = audio.hidden_size
    if audio.pooled:
        return (Matrix("linear", out, width),)
    return (Matrix("linear_fc1", width, width), Matrix("linear_fc2", out, width, by_rows=True))
