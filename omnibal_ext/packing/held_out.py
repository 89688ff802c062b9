"""Held-out samples of a corpus: left out of one packed index, and packed into another for evaluation."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.index.packed_index import PackedIndex


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A random fraction `share` of the samples, for evaluation. `packed`: an index has these alone; else all others."""

    share: float
    seed: int
    packed: bool = False

    @classmethod
    def left_out_by(cls, index: PackedIndex) -> "HeldOut":
        """Return which samples an index held out, so that these alone are packed. Raises UserError if it has all."""
        drawn = index.manifest["built_from"].get("held_out", {})
        if drawn.get("packed", True):
            raise UserError(f"--held-out-of {index.folder}: leaves no samples out; pack it with --held-out SHARE")
        return cls(drawn["share"], drawn["seed"], packed=True)

    def to_record(self) -> dict[str, Any]:
        """Return the record that an index keeps in `built_from`."""
        return asdict(self)

    def draw(self, count: int) -> NDArray[np.bool_]:
        """Return whether each of `count` samples is held out, [count]: `share` x `count` of them, rounded.

        Raises:
            UserError: none or all would be held out.
        """
        held = round(self.share * count)
        if not 0 < held < count:
            raise UserError(
                f"--held-out {self.share:g} of {count} samples are {held}: must be 1 or more, and leave some"
            )
        drawn = np.zeros(count, np.bool_)
        drawn[np.random.default_rng((self.seed, 4)).permutation(count)[:held]] = True
        return drawn

    def of(self, corpus: Corpus) -> Corpus:
        """Return the corpus without the held-out samples, or, if `packed`, with these alone, each once."""
        drawn = self.draw(len(corpus.sizes))
        if self.packed:
            return replace(corpus.weighted([1.0] * len(corpus.sources)), kept=drawn)
        return replace(corpus, kept=~drawn)
