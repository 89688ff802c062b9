"""Samples of a corpus that are held out: left out of one packed index, and packed by another for evaluation."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.index.packed_index import PackedIndex


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A share of the samples, drawn by seed; `packed` if an index has these alone, else it has the rest."""

    share: float
    seed: int
    packed: bool = False

    @classmethod
    def left_out_by(cls, index: PackedIndex) -> "HeldOut":
        """Return the samples that an index left out, to be packed. Raises UserError if it left none out."""
        drawn = index.manifest["built_from"].get("held_out", {})
        if drawn.get("packed", True):
            raise UserError(f"--held-out-of {index.folder}: leaves no samples out; pack it with --held-out SHARE")
        return cls(drawn["share"], drawn["seed"], packed=True)

    def to_record(self) -> dict[str, Any]:
        """Return it as an index keeps it, in `built_from`."""
        return asdict(self)

    def draw(self, count: int) -> NDArray[np.bool_]:
        """Return which of `count` samples are held out, [count]: as many as the share comes to, rounded.

        Raises:
            UserError: none are, or all.
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
        """Return the corpus of which only the rest is packed; or only these, each once."""
        drawn = self.draw(len(corpus.sizes))
        if self.packed:
            return replace(corpus.weighted([1.0] * len(corpus.sources)), kept=drawn)
        return replace(corpus, kept=~drawn)
