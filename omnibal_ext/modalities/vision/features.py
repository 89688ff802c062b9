"""Which of the ViT's features each image token is, where these are not one after the other (`FeatureOrder`)."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

NEWLINE = -1


@dataclass(frozen=True)
class FeatureOrder:
    """Which of the ViT's output rows (features) each image token is, or of which four it is a weighted mean."""

    sources: NDArray[np.int64]
    """Feature numbers [tokens], or [tokens, 4] if tokens are weighted means; NEWLINE is the model's newline."""
    weights: NDArray[np.float32] | None = None
    """[tokens, 4]; None: every token is one feature."""

    def __len__(self) -> int:
        return len(self.sources)

    def as_means(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return `sources` and `weights`, both [tokens, 4]: a token that is one feature has weight 1 on it."""
        if self.weights is not None:
            return self.sources, self.weights
        weights = np.zeros((len(self), 4), np.float32)
        weights[:, 0] = 1.0
        return np.repeat(self.sources[:, None], 4, axis=1), weights


def joined_orders(images: Iterable[tuple[int, FeatureOrder]]) -> FeatureOrder:
    """Join the orders of images that follow each other to one; `images`: (number of features, order) of each."""
    moved, offset = [FeatureOrder(np.empty(0, dtype=np.int64))], 0
    for features, order in images:
        moved.append(replace(order, sources=np.where(order.sources == NEWLINE, NEWLINE, order.sources + offset)))
        offset += features
    if all(order.weights is None for order in moved):
        return FeatureOrder(np.concatenate([order.sources for order in moved]))
    sources, weights = zip(*(order.as_means() for order in moved), strict=True)
    return FeatureOrder(np.concatenate(sources), np.concatenate(weights))
