"""Budgets and what is trained, in memory and in files."""

import ast
import json
from collections import Counter
from collections.abc import Iterator

import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import ENCODED, budget_fields, budgets_in, in_place, in_words, with_budget_keys
from omnibal_ext.plan import Plan
from omnibal_ext.trained import Trained
from tests.chains import layer_chain
from tests.programs import ROOT

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


NAMES = {kind for one in ENCODED for kind in one.kinds} | {one.size for one in ENCODED} | {one.name for one in ENCODED}
ROOMS, KINDS = ("data/inputs", "data/schemas", "preprocessing/measures"), ("images", "sounds", "films")
OPEN = {
    "omnibal_ext/costs/profile.py": 1,  # a profile says features of the ViT alone
    "omnibal_ext/costs/tower.py": 1,
    "megatron/vlm/data/columns.py": 1,  # of older datasets
    "megatron/vlm/data/sample.py": 1,  # runs of an image's tokens follow from the tiling rule
    "megatron/vlm/preprocessing/samples.py": 1,  # images are what all models take
    "megatron/vlm/preprocessing/shorten.py": 1,  # images of a sample share its tiles
}
"""Conditions on an encoder's kind or name that there are yet, by module; a new modality would have to visit them."""


def test_no_module_outside_families_and_modalities_asks_which_encoder_it_is() -> None:
    """Models of one encoder, and modules that read or measure one kind of input, are its own."""
    own = (
        "families",
        "modalities",
        "models/vit/",
        "models/audio.py",
        "models/films.py",
        *(f"{room}/{kind}.py" for room in ROOMS for kind in KINDS),
    )
    found = Counter[str]()
    for room in ("omnibal_ext", "megatron/vlm", "tools"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not any(part in name for part in own):
                found[name] += len(set(asked_lines(ast.parse(path.read_text()))))
    assert {name: count for name, count in found.items() if count} == OPEN


def asked_lines(tree: ast.AST) -> Iterator[int]:
    """Lines of conditions that name an encoder, by its kind, its size, its name or its constant."""
    for node in ast.walk(tree):
        conditions: list[ast.AST] = [node] if isinstance(node, ast.Compare) else []
        conditions += [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else []
        conditions += node.ifs if isinstance(node, ast.comprehension) else []
        conditions += [case.pattern for case in node.cases] if isinstance(node, ast.Match) else []
        yield from (one.lineno for one in conditions if any(map(names_an_encoder, ast.walk(one))))


def names_an_encoder(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=str(text)):
            return text in NAMES
        case ast.Name(id="VISION" | "AUDIO"):
            return True
        case ast.Attribute(attr="audio"):
            return True
    return False


@pytest.mark.parametrize(
    ("code", "asks"),
    [
        ("if kind == 'vit': pass", True),
        ("x = 1 if model.audio else 2", True),
        ("x = [one for one in all if one is not AUDIO]", True),
        ("match kind:\n case 'frames': pass", True),
        ("x = {'tiles': 1}\nif x: pass", False),
        ("if part.audio_budget: pass", False),
    ],
)
def test_a_condition_on_an_encoder_is_found(code: str, asks: bool) -> None:
    assert bool([*asked_lines(ast.parse(code))]) == asks
