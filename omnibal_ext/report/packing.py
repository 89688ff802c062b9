"""What a report says of a packed index: sizes before and after, waste, what was tried, what was left out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from markupsafe import Markup

from omnibal_ext.packing.index import REMEDY, PackedIndex
from omnibal_ext.packing.packs import TILES, TOKENS
from omnibal_ext.reading.checks import record, text
from omnibal_ext.reading.document import read_lines
from omnibal_ext.report import draw
from omnibal_ext.sizes import Sizes

SHOWN = 8
"""Examples of what was left out; budgets that were tried."""

REJECT = record({"reason": text})


@dataclass(frozen=True)
class PackingView:
    """An index, drawn."""

    index: PackedIndex
    sizes: Sizes | None
    measures: Sequence[tuple[str, Any]] = ()
    """(measure, value) of `tools/pack_data.py`."""
    waste: Sequence[tuple[str, float]] = ()
    tried: Sequence[dict[str, Any]] = ()
    saved: str = ""
    """What packing saves against random batches, in words."""

    @classmethod
    def of_index(cls, index: PackedIndex, sizes: Sizes | None) -> "PackingView":
        """What can be said from the index, and the sizes where they are known."""
        return cls(index, sizes)

    @property
    def headline(self) -> str:
        """In one sentence."""
        manifest = self.index.manifest
        packs = int(manifest["epoch_packs"][0])
        samples = int(self.index.pack_offsets[packs])
        return (
            f"{samples:,} samples in {packs:,} packs of at most {self.index.vit_budget:,} tiles and "
            f"{self.index.llm_budget:,} tokens, by method {manifest['method']}, {samples / packs:.1f} a pack; "
            f"{manifest['rejected']:,} left out."
        )

    @property
    def histograms(self) -> list[Markup]:
        """Samples before, packs after; axes from 0."""
        packs = int(self.index.manifest["epoch_packs"][0])
        loads, counts = np.asarray(self.index.loads[:packs]), np.diff(self.index.pack_offsets[: packs + 1])
        drawn = []
        if self.sizes is not None:
            drawn.append(draw.histogram("Tiles of a sample", self.sizes.tiles.tolist()))
            drawn.append(draw.histogram("Tokens of a sample", self.sizes.tokens.tolist()))
        drawn.append(draw.histogram("Tiles of a pack", loads[:, TILES].tolist(), self.index.vit_budget))
        drawn.append(draw.histogram("Tokens of a pack", loads[:, TOKENS].tolist(), self.index.llm_budget))
        drawn.append(draw.histogram("Samples of a pack", counts.tolist()))
        return drawn

    @property
    def rejects(self) -> list[dict[str, Any]]:
        """The first samples that were left out."""
        path = self.index.folder / "rejected.jsonl"
        if not path.exists():
            return []
        return list(islice(read_lines(path, REJECT, REMEDY), SHOWN))

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """Why samples were left out, and how many."""
        path = self.index.folder / "rejected.jsonl"
        if not path.exists():
            return []
        return Counter(line["reason"] for line in read_lines(path, REJECT, REMEDY)).most_common()

    @property
    def sources(self) -> list[tuple[str, int, float]]:
        """(name, samples, weight) of each source."""
        return [(s["name"], s["samples"], s["weight"]) for s in self.index.manifest["sources"]]
