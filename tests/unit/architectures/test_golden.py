"""What the planner is told of each preset is what it was when golden.json was written, to the last bit.

python -m tests.unit.architectures.test_golden > tests/unit/architectures/golden.json      writes it anew
"""

import hashlib
import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from omnibal_ext.adapters import Adapters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.presets import PRESETS
from omnibal_ext.chain import PARTS, gradient_mode, size_of
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.operations import ModelOperations
from omnibal_ext.errors import UserError
from omnibal_ext.matrices import matrices_of
from omnibal_ext.modalities.modality import MODALITIES
from omnibal_ext.packing.costs import PackCosts
from tests.media import audio_of

GOLDEN = Path(__file__).with_name("golden.json")
SUBSETS = [parts for count in range(4) for parts in combinations(PARTS, count)]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"tensor_model_parallel_size": 2, "replica_ranks": 8},
    {"frozen": ("vit",), "replica_ranks": 4},
    {"adapters": Adapters(4, 8.0, ("vit", "llm"))},
    {"adapters": Adapters(4, 8.0, ("projector",)), "tensor_model_parallel_size": 2},
]


ONES = dict.fromkeys(MODALITIES, 1)


def _profiles(model: Architecture) -> Iterator[Any]:
    for frames, settings in zip((1, 3000, 700, 1, 1), SETTINGS, strict=True):
        try:
            profile = analytic_profile(
                model,
                "h100",
                {"tiles": 4096 if model.vision.native else 12, "tokens": 4096, "frames": frames, "stills": 16},
                **settings,
            )
        except UserError as error:
            yield str(error)
            continue
        record = profile.to_record()
        record["notes"].pop("float8", None)  # came later; for people
        yield record
        yield PackCosts.of_profile(profile).to_record()
        yield profile.features_after, [profile.mode(kind) for kind in profile.layers]


def _written(counted: ModelOperations) -> str:
    """As when golden.json was written: of sizes that came later, those that a model has."""
    (tile, token, frame, *later), square = counted.units.values(), counted.square
    more = f", {later=}" if any(later) else ""
    return f"ModelOperations({tile=}, {token=}, {square=}, counted={counted.counted}, {frame=}{more})"


def facts(model: Architecture) -> dict[str, Any]:
    """All that the planner asks of a model."""
    extras = [
        [(one.giver, one.takers, one.at(ONES).shape, one.rows, one.added, bool(one.of)) for one in model.extras(ranks)]
        for ranks in (1, 2)
    ]
    modes = [
        gradient_mode(kind, frozen, adapted)
        for kind in model.chain for frozen in SUBSETS for adapted in SUBSETS
    ]  # fmt: skip
    return {
        "hash": model.hash,
        "chain": [model.chain, model.cost_kinds, model.layers_apart, [size_of(kind) for kind in model.chain]],
        "modes": modes,
        "extras": [extras, model.features_after, model.carried_after(2), model.streams],
        "matrices": [sorted((k, repr(one)) for k, one in matrices_of(model, ranks).items()) for ranks in (1, 2, 3)],
        "tokens": [
            [model.image_tokens(n), audio_of(model).tokens(n) if audio_of(model) else 0]
            for n in (1, 4, 100, 1000, 2304)
        ],
        "profiles": [*_profiles(model)],
        "operations": [
            _written(ModelOperations.of(model)),
            _written(ModelOperations.of(model, ("vit",))),
            _written(ModelOperations.of(model, adapters=Adapters(2, 4.0, ("llm", "projector")))),
        ],
    }


def digests(model: Architecture) -> dict[str, str]:
    """Of each of `facts` the first 12 digits of a hash."""
    texts = {name: json.dumps(value, sort_keys=True) for name, value in facts(model).items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:12] for name, text in texts.items()}


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_that_the_planner_is_told_of_a_preset_has_changed(name: str) -> None:
    """See the head of this file."""
    assert digests(PRESETS[name]) == json.loads(GOLDEN.read_text())[name]


if __name__ == "__main__":
    rows = [f"{json.dumps(name)}: {json.dumps(digests(model))}" for name, model in PRESETS.items()]
    print("{\n" + ",\n".join(rows) + "\n}")
