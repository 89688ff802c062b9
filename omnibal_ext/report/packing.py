"""What a report shows of a packed index: sizes before and after packing, waste, budgets tried, samples left out."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from markupsafe import Markup

from omnibal_ext.modalities.modality import FURTHER, Modality
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.index.histograms import waste_by_kind
from omnibal_ext.packing.index.packed_index import REMEDY, PackedIndex
from omnibal_ext.packing.index.summary import Summary
from omnibal_ext.packing.index.why import Answer, PlacedPack
from omnibal_ext.packing.packs import TILES, TOKENS
from omnibal_ext.reading.checks import record, text
from omnibal_ext.reading.document import read_lines
from omnibal_ext.report import draw
from omnibal_ext.sizes import Sizes

SHOWN = 8
"""Most rows listed of samples left out, and of budgets tried."""

REJECT = record({"reason": text})


@dataclass(frozen=True)
class PackingView:
    """Drawings and measures of a packed index."""

    index: PackedIndex
    sizes: Sizes | None
    measures: Sequence[tuple[str, Any]] = ()
    """(measure, value) of `omnibal pack`."""
    waste: Sequence[tuple[str, float]] = ()
    tried: Sequence[dict[str, Any]] = ()
    asked: Answer | None = None
    """The sample whose packs are drawn, if one was asked for."""

    @classmethod
    def of_summary(
        cls, index: PackedIndex, corpus: Corpus, summary: Summary, tried: Sequence[dict[str, Any]]
    ) -> "PackingView":
        """Make a view from all results of packing."""
        measures = [
            (name.replace("_", " "), value) for name, value in summary.to_record().items() if np.isscalar(value)
        ]
        return cls(index, corpus.sizes, measures, waste_by_kind(summary), tried[:SHOWN])

    @property
    def headline(self) -> str:
        """The index in one sentence."""
        manifest = self.index.manifest
        packs = int(manifest["epoch_packs"][0])
        samples = int(self.index.pack_offsets[packs])
        further = "".join(f", {budget:,} {one.units}" for one, budget in self._further)
        return (
            f"{samples:,} samples in {packs:,} packs of at most {self.index.vit_budget:,} tiles and "
            f"{self.index.llm_budget:,} tokens{further}, by method {manifest['method']}, {samples / packs:.1f} a pack; "
            f"{manifest['rejected']:,} left out."
        )

    @property
    def histograms(self) -> list[Markup]:
        """Drawn histograms: sizes of samples, if the index's sources are there, and of packs."""
        packs = int(self.index.manifest["epoch_packs"][0])
        loads, counts = np.asarray(self.index.loads[:packs]), np.diff(self.index.pack_offsets[: packs + 1])
        drawn = []
        if self.sizes is not None:
            drawn.append(draw.histogram("Tiles of a sample", self.sizes.tiles.tolist()))
            drawn.append(draw.histogram("Tokens of a sample", self.sizes.tokens.tolist()))
        drawn.append(draw.histogram("Tiles of a pack", loads[:, TILES].tolist(), self.index.vit_budget))
        drawn.append(draw.histogram("Tokens of a pack", loads[:, TOKENS].tolist(), self.index.llm_budget))
        for one, budget in self._further:
            units = loads[:, self.index.load_names.index(one.size)]
            drawn.append(draw.histogram(f"{one.units.capitalize()} of a pack", units.tolist(), budget))
        drawn.append(draw.histogram("Samples of a pack", counts.tolist()))
        return drawn

    @property
    def asked_packs(self) -> list[tuple[PlacedPack, Markup]]:
        """Packs of the sample that was asked for, each with its budgets drawn."""
        return [(placed, self._budgets_of(placed)) for placed in self.asked.packs] if self.asked else []

    def _budgets_of(self, placed: PlacedPack) -> Markup:
        """Draw how full a pack is in each size, and what of it is the sample's, if that is known."""
        assert self.asked
        rows = []
        for size, load, budget in placed.used:
            own = self.asked.sizes.get(size, 0)
            parts = [("vit", 100 * own / budget), ("data", 100 * (load - own) / budget)]
            rows.append((f"{size}: {load:,} of {budget:,}" + f", {own:,} of them the sample's" * (own > 0), parts))
        return draw.bars(f"Pack {placed.pack}, of {len(placed.samples)} samples", rows, "%", 100)

    @property
    def _further(self) -> list[tuple[Modality, int]]:
        return [(one, self.index.budgets[one.size]) for one in FURTHER if one.size in self.index.budgets]

    @property
    def rejects(self) -> list[dict[str, Any]]:
        """The first `SHOWN` samples that were left out."""
        return list(islice(self._rejected(), SHOWN))

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """(reason, number of samples left out for it), the most frequent first."""
        return Counter(line["reason"] for line in self._rejected()).most_common()

    def _rejected(self) -> Iterator[dict[str, Any]]:
        path = self.index.folder / "rejected.jsonl"
        return read_lines(path, REJECT, REMEDY) if path.exists() else iter(())

    @property
    def sources(self) -> list[tuple[str, int, float]]:
        """(name, samples, weight) of each source."""
        return [(s["name"], s["samples"], s["weight"]) for s in self.index.manifest["sources"]]
