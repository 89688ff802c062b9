"""Turns of the tokens of a video and of its own sound, as transformers' Omni processors write them.

Qwen2.5-Omni   chunks of 2 seconds    V V V V A A A A | V V V V A A A A | A A
Qwen3-Omni     step by step           V V A A A | V V A A A | V V A A A A A
"""

from itertools import groupby

import numpy as np

from omnibal_ext.modalities.vision.architecture import VideoClock


def token_turns(clock: VideoClock, steps: int, tokens: int, seconds: float, heard: int) -> tuple[int, ...]:
    """Return lengths of alternating runs of a video's tokens and of its sound's, the video's first.

    The video has `steps`, `seconds` apart, of `tokens` tokens each; its sound has `heard` tokens, at least one.
    """
    seen = np.repeat(np.arange(steps) * seconds * clock.per_second, tokens)
    of_sound = np.arange(heard)
    if clock.chunk_seconds is None:  # a step comes before sound of the same time
        order = np.argsort(np.concatenate([seen, of_sound]), kind="stable") >= len(seen)
    else:
        chunk = int(clock.per_second * clock.chunk_seconds)
        numbers = np.concatenate([_chunks(seen, chunk), _chunks(of_sound, chunk)])
        order = np.argsort(numbers, kind="stable") >= len(seen)
    return tuple(len(list(run)) for _, run in groupby(order.tolist()))


def _chunks(times: np.ndarray, chunk: int) -> np.ndarray:
    """Return each token's chunk of time; from token to token it rises by one at most, even if more time has passed."""
    numbers, number = [], 0
    for time in times.tolist():
        number += time >= (number + 1) * chunk
        numbers.append(number)
    return np.array(numbers)
