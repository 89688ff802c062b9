"""Budgets and what is trained, in memory and in files."""

import json

import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import budget_fields, budgets_in, in_place, in_words, with_budget_keys
from omnibal_ext.plan import Plan
from omnibal_ext.trained import Trained
from tests.chains import layer_chain

HEARS, SEES = preset("qwen2.5-omni-3b"), preset("tiny")


def test_budgets_have_their_keys_in_files_and_none_that_is_zero_in_memory() -> None:
    assert budgets_in({"vit_budget": 4, "llm_budget": 9, "audio_budget": 0, "other": 3}) == {"tiles": 4, "tokens": 9}
    assert budget_fields({"frames": 7, "tiles": 4}) == {"vit_budget": 4, "llm_budget": 0, "audio_budget": 7}
    assert in_words({"frames": 7000, "tiles": 4, "tokens": 9}) == "4 tiles, 9 tokens, 7,000 mel frames"


def test_fields_of_a_value_stand_in_its_place() -> None:
    record = {"a": 1, "budgets": {"tiles": 2, "frames": 3}, "b": 4, "trained": {}, "c": 5}
    found = in_place(with_budget_keys(record, behind="b"), {"trained": Trained(("vit",)).to_record()})
    names = ["a", "vit_budget", "llm_budget", "b", "audio_budget", "frozen", "lora_rank", "lora_targets", "c"]
    assert list(found) == names
    assert Trained.from_record(found) == Trained(("vit",))
    assert Trained.from_record({}) == Trained()


def test_the_fields_of_files_stand_where_they_did() -> None:
    """As in files of before there was a mapping."""
    profile = analytic_profile(HEARS, "h100", {"tiles": 4, "tokens": 64, "frames": 100})
    names = list(profile.to_record())
    assert names[names.index("layers") + 1 : names.index("frozen") + 3] == [
        "vit_budget", "llm_budget", "parameters", "audio_budget", "tensor_model_parallel_size",
        "expert_model_parallel_size", "frozen", "lora_rank", "lora_targets",
    ]  # fmt: skip
    assert Profile.from_record(json.loads(json.dumps(profile.to_record()))) == profile
    assert "audio_budget" not in analytic_profile(SEES, "h100", {}).to_record()
    assert analytic_profile(SEES, "h100", {}).fields["audio_budget"] == 0
    plan = Plan.from_cuts(layer_chain(1, 1, 1), (), budgets={"tiles": 4, "tokens": 64, "frames": 100})
    names = list(plan.to_record())
    assert names[names.index("profile_hash") + 1 :][:7] == [
        "vit_budget", "llm_budget", "method", "memory_gib", "frozen", "lora_rank", "lora_targets"
    ]  # fmt: skip
    assert names[names.index("alternatives") + 1] == "audio_budget"
    assert Plan.from_record(json.loads(json.dumps(plan.to_record()))) == plan


@pytest.mark.parametrize("value", [None, "", False, -1, 2**40])
@pytest.mark.parametrize("key", ["vit_budget", "llm_budget", "audio_budget"])
def test_a_budget_that_is_none_is_refused(key: str, value: object) -> None:
    record = Plan.from_cuts(layer_chain(1, 1, 1), ()).to_record()
    with pytest.raises(UserError, match=f"{key} must be a whole number"):
        Plan.from_record({**record, key: value})


@pytest.mark.parametrize("name", ["budgets", "trained"])
def test_names_in_memory_are_no_fields_of_files(name: str) -> None:
    record = analytic_profile(SEES, "h100", {}).to_record()
    with pytest.raises(UserError, match=f"{name} is not a field of profiles"):
        Profile.from_record({**record, name: {}})


def test_layers_are_measured_at_budgets_of_all_modalities_that_a_model_has_and_of_no_other() -> None:
    assert HEARS.profiled({"tiles": 0, "tokens": 8, "frames": 0}) == {"tiles": 0, "tokens": 8, "frames": 1}
    assert HEARS.profiled({"tokens": 8}) == {"tiles": 1, "tokens": 8, "frames": 1}
    assert SEES.profiled({"tiles": 3, "tokens": 8, "frames": 5}) == {"tiles": 3, "tokens": 8}
    SEES.check_budgets({"tiles": 3, "tokens": 8})
    with pytest.raises(UserError, match="--audio-budget 5: tiny has no encoder of mel frames; leave it out"):
        SEES.check_budgets({"frames": 5})
