"""Every field of peft's LoraConfig is honoured as peft does, or refused by name."""

import json
import re
import shutil
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron.vlm.checkpoint.integrity import seal_by_one_process
from megatron.vlm.hf.check import _merged
from megatron.vlm.hf.checkpoint import OurCheckpoint
from megatron.vlm.hf.convert import from_hugging_face, to_hugging_face, to_peft
from megatron.vlm.hf.peft_config import ALLOWED_VALUES, IGNORED_FIELDS, NEEDED, OPTIONAL, PeftConfig
from omnibal_ext.adapters import Adapters
from omnibal_ext.errors import UserError
from tests.unit.hf import models
from tools.convert_checkpoint import _say_other_base

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

OTHERS = {one.name for one in fields(peft.LoraConfig)} - {*NEEDED, *OPTIONAL, *ALLOWED_VALUES, *IGNORED_FIELDS}
IDLE = "model.vision_tower.encoder.layers.2.mlp.fc1"
"""In the last layer of CLIP, of which LLaVA takes the one before."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    models.build("llava", seed=1).save_pretrained(folder)
    return folder


def saved(folder: Path, **changed: Any) -> Path:
    layers = [name for name, one in models.build("llava", seed=1).named_modules() if type(one) is torch.nn.Linear]
    layers = [name for name in layers if "lm_head" not in name]
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 6, "target_modules": layers, **changed})
    with warnings.catch_warnings(action="ignore"):
        model = models.with_random_adapters(peft.get_peft_model(models.build("llava", seed=1), config))
    model.save_pretrained(folder)
    return folder


def merged_by_peft(folder: Path) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings(action="ignore"):
        model = peft.PeftModel.from_pretrained(models.build("llava", seed=1), folder, torch_device="cpu")
        return model.merge_and_unload().state_dict()


def difference(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted)


def changed(folder: Path, **fields: Any) -> Path:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    "given",
    [
        *({"init_lora_weights": value} for value in ALLOWED_VALUES["init_lora_weights"]),
        {"use_rslora": True, "r": 3, "lora_alpha": 5},
        {"lora_dropout": 0.05, "bias": "none"},
        {"fan_in_fan_out": True, "ensure_weight_tying": True},
        {"rank_pattern": {"q_proj": 2, "proj": 5}, "alpha_pattern": {r"layers\.0\.mlp\.fc1": 6, "nowhere": 5}},
        {"target_modules": ["q_proj", "fc2"], "layers_to_transform": [0], "layers_pattern": "layers"},
        {"target_modules": "all-linear", "exclude_modules": ["k_proj", "lm_head"], "task_type": "CAUSAL_LM"},
        {
            "eva_config": {"rho": 1.5}, "corda_config": {}, "lora_ga_config": {"direction": "ArBr"},
            "loftq_config": {"loftq_bits": 4}, "qalora_group_size": 8, "megatron_core": "elsewhere",
            "auto_mapping": {"base_model_class": "X"}, "revision": "main", "peft_version": "0.21.0",
        },
    ],
    ids=",".join,
)  # fmt: skip
def test_what_is_read_is_merged_and_written_as_peft_does(tmp_path: Path, base: Path, given: dict[str, Any]) -> None:
    as_saved = {} if "eva" in given.values() else given  # to begin so asks for data
    folder = changed(saved(tmp_path / "peft", **as_saved), **(given if as_saved != given else {}))
    wanted = merged_by_peft(folder)
    assert difference(wanted, models.build("llava", seed=1).state_dict()) > 0.01
    from_hugging_face(base, tmp_path / "ours", folder)
    to_hugging_face(tmp_path / "ours", tmp_path / "merged")
    found = type(models.build("llava", seed=1)).from_pretrained(tmp_path / "merged").state_dict()
    assert difference(found, wanted) < 1e-6
    to_peft(tmp_path / "ours", tmp_path / "back")
    assert difference(merged_by_peft(tmp_path / "back"), wanted) < 1e-6
    before, after = (json.loads((tmp_path / one / "adapter_config.json").read_text()) for one in ("peft", "back"))
    kept = ("r", "lora_alpha", "use_rslora", "lora_dropout")
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


@pytest.mark.parametrize("kind", ["qwen2.5-omni", "qwen3-omni"])
def test_adapters_of_a_whole_omni_are_those_of_its_thinker(tmp_path: Path, kind: str) -> None:
    """Trained with the whole class or the thinker's, they are written for the whole again."""
    thinker = models.build(kind, seed=1)
    name = type(thinker).__name__.replace("Thinker", "")
    config = getattr(transformers, name).config_class(thinker_config=thinker.config, enable_audio_output=False)

    def whole() -> torch.nn.Module:
        made = getattr(transformers, name)(config)
        made.thinker.load_state_dict(models.build(kind, seed=1).state_dict())
        return made

    whole().save_pretrained(tmp_path / "theirs")
    layers = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj"], exclude_modules=".*audio.*")
    models.with_random_adapters(peft.get_peft_model(whole(), layers)).save_pretrained(tmp_path / "whole")
    models.with_random_adapters(peft.get_peft_model(thinker, layers)).save_pretrained(tmp_path / "thinker")
    with warnings.catch_warnings(action="error", category=UserWarning):
        wanted = peft.PeftModel.from_pretrained(whole(), tmp_path / "whole", torch_device="cpu").merge_and_unload()
    for way in ("whole", "thinker"):
        from_hugging_face(tmp_path / "theirs", tmp_path / f"ours {way}", tmp_path / way)
        to_peft(tmp_path / f"ours {way}", tmp_path / f"back {way}")
        named = load_file(tmp_path / f"back {way}/adapter_model.safetensors")
        assert all(one.startswith("base_model.model.thinker.model.") for one in named)
        back = peft.PeftModel.from_pretrained(whole(), tmp_path / f"back {way}", torch_device="cpu").merge_and_unload()
        assert difference(back.state_dict(), wanted.state_dict()) < 1e-6
    for way in ("whole", "thinker", "back whole"):  # as --check has it, whose class is the thinker's
        checked = _merged(models.build(kind, seed=1), tmp_path / way, "thinker.")
        assert difference(checked.state_dict(), wanted.thinker.state_dict()) < 1e-6


def test_adapters_of_a_layer_that_never_runs_come_back_bit_by_bit(tmp_path: Path, base: Path) -> None:
    """Also from a save of a run that began there and has its model from elsewhere."""
    ours, run = tmp_path / "ours", tmp_path / "run"
    from_hugging_face(base, ours, saved(tmp_path / "peft"))
    shutil.copytree(ours / "release", run / "release")
    shutil.copyfile(ours / "latest_checkpointed_iteration.txt", run / "latest_checkpointed_iteration.txt")
    (run / "release/integrity.json").unlink()
    seal_by_one_process(run / "release", {**OurCheckpoint(ours).run, "preset": str(base), "from": str(ours)})
    for number, (folder, like) in enumerate(((ours, None), (ours, base), (run, None), (run, base))):
        to_peft(folder, tmp_path / f"{number}", like)
        before, after = (load_file(tmp_path / one / "adapter_model.safetensors") for one in ("peft", f"{number}"))
        assert f"base_model.model.{IDLE}.lora_A.weight" in before
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_scales_over_the_root_of_the_rank_are_those_of_plain_adapters(tmp_path: Path) -> None:
    config = PeftConfig.read(saved(tmp_path / "peft", use_rslora=True, r=3, lora_alpha=5))
    adapters = Adapters(config.rank, config.alpha, ("llm",))
    assert adapters.scale == pytest.approx(5 / 3**0.5, rel=1e-12)
    alpha = adapters.flags[adapters.flags.index("--lora-alpha") + 1]
    assert float(alpha) == adapters.alpha, "a run is told by a flag"


@pytest.mark.parametrize("name", sorted(OTHERS | {"a_field_of_tomorrow"}))
def test_what_must_be_off_is_refused_by_name(tmp_path: Path, name: str) -> None:
    folder = saved(tmp_path / "peft")
    for off in (None, False, [], {}):
        PeftConfig.read(changed(folder, **{name: off}))
    for on in (True, ["lm_head"], {"a": 1}, "yes"):
        with pytest.raises(UserError, match=f"adapter_config.json: {name} is .*merge_and_unload"):
            PeftConfig.read(changed(folder, **{name: on}))


def test_a_field_of_another_value_is_refused_by_name(tmp_path: Path) -> None:
    folder = saved(tmp_path / "peft")
    for name, value in (("peft_type", "IA3"), ("bias", "all"), ("fan_in_fan_out", "yes")):
        with pytest.raises(UserError, match=f"{name} is '{value}'; supported: "):
            PeftConfig.read(changed(folder, **{name: value}))
        changed(folder, peft_type="LORA", bias="none", fan_in_fan_out=False)
    for start in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "of another day", None):
        with pytest.raises(UserError, match=f"init_lora_weights is {start!r}; .*merge_and_unload"):
            PeftConfig.read(changed(folder, init_lora_weights=start))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"trainable_token_indices": [1, 2]}, r"trainable_token_indices is \[1, 2\]; .*merge_and_unload"),
        ({"target_modules": ["embed_tokens", "q_proj"]}, r"embed_tokens.*merge_and_unload"),
    ],
)
def test_more_than_layers_adapters_is_refused(tmp_path: Path, base: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_hugging_face(base, tmp_path / "ours", saved(tmp_path / "peft", **given))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, ""),
        ({"lora_dropout": 0.05}, "note: .*lora_dropout is 0.05; adapters have no dropout here"),
        ({"init_lora_weights": "mica"}, "note: .*init_lora_weights is 'mica', which trains A alone"),
    ],
)
def test_what_is_trained_otherwise_is_said_in_a_line(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any], said: str
) -> None:
    folder = saved(tmp_path / "peft", **given)
    capsys.readouterr()
    from_hugging_face(base, tmp_path / "ours", folder)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note")]
    assert len(notes) == bool(said)
    assert all(re.match(said, note) for note in notes)


@pytest.mark.parametrize(("base", "said"), [("hub/Model-1", False), ("/home/other/model-1/", False),
                                            ("hub/other", True), (None, False), ("", False)])  # fmt: skip
def test_adapters_of_another_model_are_said(
    base: str | None, said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": base}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields))
    _say_other_base(tmp_path, Path("models/Model-1"))
    told = capsys.readouterr().err
    assert told == (f"note: {tmp_path} says that its adapters were trained on {base}, not on Model-1\n" if said else "")
