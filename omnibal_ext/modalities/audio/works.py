"""Counts the work of an audio encoder's layers from their shapes.

Every tensor-parallel rank embeds all mel frames; layers are those of a ViT, and rows attend to those of their window.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from omnibal_ext.modalities.audio.architecture import AudioArchitecture
from omnibal_ext.modalities.audio.matrices import matrices
from omnibal_ext.modalities.modality import AUDIO, Size
from omnibal_ext.modalities.vision.layer_work import vit_work
from omnibal_ext.modalities.work import BYTES, Work

if TYPE_CHECKING:
    from omnibal_ext.architectures.architecture import Architecture


def works(model: "Architecture", units: Mapping[Size, int], t: int, e: int) -> dict[str, Work]:
    """Return the work of one layer of each kind on one sound, of `units` mel frames; as `costs.works.layer_works`."""
    audio, frames = AudioArchitecture.among(model.further), units[AUDIO.size]
    pairs = sum(rows * rows for rows in audio.windows(frames))
    weights = sum(matrix.weights for matrix in matrices(model, t)["audio"])
    return {
        "audio_embed": _embed(audio, frames),
        "audio": vit_work(audio.as_vit, weights, audio.rows(frames), pairs, t),
        "audio_projector": _projector(model, audio, frames, t),
    }


def _embed(audio: AudioArchitecture, frames: int) -> Work:
    """Count convolutions with kernels of 3; GELU and the mask of padding each read and write their outputs."""
    rows, h = audio.rows(frames), audio.hidden_size
    if c := audio.channels:
        # Of each convolution: the numbers of one row of the encoder that it gives, and its weights.
        halves = [-(-audio.mel_bins // 2**step) for step in (1, 2, 3)]
        given = [4 * halves[0] * c, 2 * halves[1] * c, halves[2] * c]
        weights, inner = [9 * c, 9 * c * c, 9 * c * c], h * c * halves[2]
        first, *others = (n // c * weight for n, weight in zip(given, weights, strict=True))
        multiplied = first + sum(others) + inner
        parameters = sum(weights) + 3 * c + inner
        mels, kept = 8 * audio.mel_bins, 2 * sum(given)
    else:
        weights, given = [3 * audio.mel_bins * h, 3 * h * h], [2 * h, h]
        first, parameters = 2 * weights[0], sum(weights) + 2 * h
        multiplied = first + weights[1]
        mels, kept = 2 * audio.mel_bins, 2 * given[0] + given[1]  # the last one's GELU gives what travels on
    return Work(
        parameters, multiplied, rows, h, rows * (mels + kept) * BYTES, passes=4 + 4 * sum(given) / h, copies=True,
        input_gradient=1 - first / multiplied,
    )  # fmt: skip


def _projector(architecture: "Architecture", audio: AudioArchitecture, frames: int, t: int) -> Work:
    """Count the projector, a norm and one or two matrices; all `t` tensor-parallel ranks have inputs and outputs."""
    weights = sum(matrix.weights for matrix in matrices(architecture, 1)["audio_projector"])
    tokens, h, out = max(1, audio.tokens(frames)), audio.hidden_size, architecture.language.hidden_size
    biases = out + h * (not audio.pooled)
    late, shares = (h, out) if audio.pooled else (h + out, 2 * h)
    inner = 0 if audio.pooled else 2 * h
    return Work(
        weights + biases + 2 * h, weights, tokens, out, tokens * (2 * h * t + inner) * BYTES,
        tokens * (late * t + shares) * BYTES, whole_output=True,
    )  # fmt: skip
