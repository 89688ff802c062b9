"""Profiles and plans on disk name a model by its hash: those of presets stay as they are."""

import json
from pathlib import Path

from omnibal_ext.architectures.presets import PRESETS

PUBLISHED = json.loads(Path(__file__).with_name("preset_hashes.json").read_text())


def test_presets_keep_the_hashes_that_profiles_have() -> None:
    assert {name: PRESETS[name].hash for name in PUBLISHED} == PUBLISHED
