"""What is asked of a trainer: its ways to make a batch of several samples, and the kernels for which it has them."""

from typing import Any, NamedTuple

from benchmarks.verdicts.folders import KINDS

Features = dict[str, Any]


class Way(NamedTuple):
    """A way: what it is in the trainer's words, kernels, samples (with images, words), and kinds of folders; words of
    the error by which the trainer refuses it; by kernel what the trainer itself says against it."""

    says: str
    kernels: tuple[str, ...] = ("eager", "sdpa", "flash")
    samples: tuple[str, ...] = ("images", "words")
    kinds: tuple[str, ...] = KINDS
    refusal: str | None = None
    against: tuple[tuple[str, str], ...] = ()


def listed(feature: Features, *names: str) -> Features:
    """Return fields along tokens as lists, as datasets hold them."""
    return {name: feature[name].tolist() for name in names if name in feature}
