"""Seconds of a pack in each part of the model, from a profile or from a model's shapes.

The parts are vision and language, and audio where the model hears. With pipelining they run on different devices, and
ranks wait for the slowest one in each part. Without, a rank's seconds of all add up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.architectures.presets import preset
from omnibal_ext.arrays import Floats
from omnibal_ext.chain import modality_of
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import (
    ALWAYS,
    FURTHER,
    FURTHER_SIZES,
    LANGUAGE,
    MODALITIES,
    VISION,
    Budgets,
    budgets_in,
)
from omnibal_ext.packing.packs import LOADS, sample_loads
from omnibal_ext.reading.checks import LARGEST, finite, mapping, record, text
from omnibal_ext.sizes import Sizes

DEFAULT_MODEL, DEFAULT_DEVICE = "internvl-chat-1.5", "h100"  # for costs by default
MOST_TILES = 64  # of a sample; more can only be patches
CONSTANT = "pack"  # key of the seconds per pack that do not depend on its size
COSTS = record({"parts": mapping(mapping(finite(-LARGEST), most=64), most=8)}, {"origin": text})
"""Schema of `PackCosts.to_record`; fitted seconds may be negative."""


@dataclass(frozen=True, slots=True)
class PackCosts:
    """Forward plus backward seconds in each part of the model: per unit of each load, and per pack (`CONSTANT`)."""

    parts: Mapping[str, Mapping[str, float]]
    origin: str = ""

    @classmethod
    def of_profile(cls, profile: Profile) -> "PackCosts":
        """Return the costs of a profile, measured or analytic: its layers summed by part of the model."""
        there = {*ALWAYS, *map(modality_of, profile.chain)}
        parts = {one.name: {CONSTANT: 0.0, one.size: 0.0} for one in MODALITIES if one in there}
        parts[LANGUAGE.name]["attention"] = 0.0
        for kind in profile.cost_kinds:
            cost, modality = profile.layers[kind], modality_of(kind)
            part, unit, budget = parts[modality.name], modality.size, profile.budget(modality.size)
            for seconds, fit in (
                (cost.forward_seconds, cost.forward_fit),
                (cost.backward_seconds, cost.backward_fit),
            ):
                constant, per_unit, per_square = fit or (0.0, seconds / budget, 0.0)
                part[CONSTANT] += constant
                part[unit] += per_unit
                if modality is LANGUAGE:
                    part["attention"] += per_square
        return cls(parts, f"{profile.model} on {profile.device or 'its device'}")

    @classmethod
    def of_model(
        cls,
        model: str | None = None,
        device: str = DEFAULT_DEVICE,
        vit_budget: int = 1,
        llm_budget: int = 4096,
        **further: int,
    ) -> "PackCosts":
        """Return the costs of a model (preset or folder; None: a default), by counting operations (`costs.analytic`).

        `further`: budgets under their keys, such as `audio_budget`. Raises UserError for unknown models and devices.
        """
        if unknown := further.keys() - {one.budget for one in FURTHER}:
            raise TypeError(f"no budget is called {', '.join(sorted(unknown))}")
        budgets = budgets_in({VISION.budget: vit_budget, LANGUAGE.budget: llm_budget, **further})
        return cls._counted(model, device, budgets)

    @classmethod
    def _counted(cls, model: str | None, device: str, budgets: Budgets) -> "PackCosts":
        there = {size: budget for size, budget in budgets.items() if budget}
        named = model or next((one.priced_by for one in FURTHER if one.size in there and one.priced_by), DEFAULT_MODEL)
        return cls.of_profile(analytic_profile(preset(named), device, there))

    @classmethod
    def asked_for(
        cls,
        profile: str | None,
        model: str | None,
        device: str | None,
        budgets: Budgets,
    ) -> "PackCosts":
        """Return the costs of a profile.json or, where none is given, of a model by its operations (`of_model`)."""
        if profile:
            return cls.of_profile(Profile.load(profile))
        return cls._counted(model, device or DEFAULT_DEVICE, budgets)

    def for_corpus(self, sizes: Sizes) -> "PackCosts":
        """Return the costs without parts of further sizes that a corpus does not have, such as mel frames."""
        unused = {*FURTHER_SIZES} - sizes.more.keys()
        return PackCosts({part: costs for part, costs in self.parts.items() if not unused & costs.keys()}, self.origin)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "PackCosts":
        """Return the costs in a record of `to_record`. Raises UserError if it is invalid."""
        checked = COSTS("costs", record)
        return cls(checked["parts"], checked.get("origin", ""))

    def to_record(self) -> dict[str, Any]:
        """Return the record that the manifest of an index holds."""
        return {"origin": self.origin, "parts": {part: dict(costs) for part, costs in self.parts.items()}}

    def seconds(self, loads: NDArray[np.int64], names: Sequence[str]) -> Floats:
        """Return the seconds of each pack in each part, [P, parts]; `loads` [P, K] has a column for each of `names`.

        A part of which a pack has no load takes 0 seconds: its fixed cost is left out too.
        """
        result = np.zeros((len(loads), len(self.parts)))
        for part, costs in enumerate(self.parts.values()):
            units = [(names.index(name), value) for name, value in costs.items() if name in names]
            for column, value in units:
                result[:, part] += value * loads[:, column]
            if units and costs.get(CONSTANT):
                busy = (loads[:, [column for column, _ in units]] > 0).any(axis=1)
                result[:, part] += costs[CONSTANT] * busy
        return np.maximum(result, 0.0)

    def of_samples(self, sizes: Sizes, one_sum: bool) -> Floats:
        """Return the seconds that each sample adds to its pack, per part, or in total with `one_sum`: [N, parts]."""
        each = {
            part: {unit: value for unit, value in costs.items() if unit != CONSTANT}
            for part, costs in self.parts.items()
        }
        return PackCosts(each).waited_for(sample_loads(sizes), (*LOADS, *sizes.more), one_sum)

    def waited_for(self, loads: NDArray[np.int64], names: Sequence[str], one_sum: bool) -> Floats:
        """Return packs' seconds in each part of the model, as ranks wait there for the slowest: `seconds`, [P, parts];
        with `one_sum` (each rank runs all parts) their sum, [P, 1]."""
        seconds = self.seconds(loads, names)
        return seconds.sum(axis=1, keepdims=True) if one_sum else seconds


def are_patches(sizes: Sizes) -> bool:
    """Say whether tiles can only be patches: a sample has more than `MOST_TILES`, more than images are cut into."""
    most = sizes.most(VISION.size)
    return most > MOST_TILES


def refuse_unpriced(sizes: Sizes, budgets: Budgets) -> None:
    """Raise UserError where tiles can only be patches, which the default model would price as whole tiles."""
    if are_patches(sizes) and not any(budgets.get(one.size) for one in FURTHER if one.priced_by):
        raise UserError(
            f"sample {int(sizes.tiles.argmax())} has {sizes.tiles.max()} tiles, more than {MOST_TILES}: these can only "
            "be patches, a thousand times cheaper than tiles of the model by default; name yours with --model, or give "
            "--costs"
        )
