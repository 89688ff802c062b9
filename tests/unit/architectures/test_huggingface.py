"""Published config.json files are read as the models they are; what cannot be honoured is refused by name."""

import functools
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnibal_ext.architectures.architecture import differences
from omnibal_ext.architectures.huggingface import read_architecture, read_fields
from omnibal_ext.architectures.presets import PRESETS, preset
from omnibal_ext.errors import UserError
from omnibal_ext.families.registry import FAMILIES, MODEL_TYPES, MODELS
from omnibal_ext.modalities.language.rope import Rope, RopeScaling
from tests.languages import altered

Fields = dict[str, Any]
DEFAULTS = {
    kind: known.defaults
    for kind, known in {**MODEL_TYPES, **{kind: one.model_type for kind, one in MODELS.items()}}.items()
}
OWN = {name: one.config for family in FAMILIES for name, one in family.presets.items()}
"""Of our presets, with no more than tells them from others of their family."""
HERE = Path(__file__).parent
CONFIGS: dict[str, Fields] = json.loads((HERE / "published.json").read_text())
"""Fields as published, those that say nothing of the model left out; PaddleOCR-VL's from memory, the language model's
on the top level and the ViT's section under the model's own type."""
INTERNVL_CHAT, LLAVA_1_5, QWEN2_5_VL, QWEN3_VL, GEMMA_3, GEMMA_4, PALIGEMMA, PADDLEOCR_VL = (
    CONFIGS[name] for name in (
        "internvl-chat-1.5", "llava-1.5-7b", "qwen2.5-vl-7b", "qwen3-vl-8b", "gemma-3-27b", "gemma-4-31b",
        "paligemma-3b-448", "paddleocr-vl",
    )
)  # fmt: skip
INTERNVL_HF: Fields = {
    "architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl",
    "text_config": {"model_type": "qwen2"}, "vision_config": {"model_type": "internvl_vision"},
}  # fmt: skip


def write(folder: Path, config: Fields) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed(config: Mapping[str, Any], changes: Fields) -> Fields:
    """A copy with fields changed; names may lead into sections, "text_config.vocab_size"."""
    copy: Fields = json.loads(json.dumps(config))
    for where, value in changes.items():
        *sections, field = where.split(".")
        functools.reduce(dict.__getitem__, sections, copy)[field] = value
    return copy


def read(folder: Path, config: Fields, name: str = "model") -> Any:
    return preset(str(write(folder / name, config)))


def with_fields_twice(config: Fields) -> Fields:
    """As transformers 4.52 to 4.55 saved Qwen2-VL and Qwen2.5-VL."""
    outer = ("architectures", "vision_config", "model_type", "transformers_version")
    text = {name: value for name, value in config.items() if name not in outer}
    text |= {"model_type": f"{config['model_type']}_text", "sliding_window": None, "image_token_id": None}
    text["rope_scaling"] = {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}
    return {**config, "text_config": text, "transformers_version": "4.53.1"}


def test_a_folder_that_is_called_like_a_preset_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert preset("tiny") == PRESETS["tiny"], "a folder of something else"
    write(tmp_path / "tiny", LLAVA_1_5)
    assert preset("tiny").language != PRESETS["tiny"].language


def test_fields_that_came_later_leave_the_hash_of_others_alone() -> None:
    """Profiles, plans and runs on disk name a model by it."""
    published = json.loads((HERE / "preset_hashes.json").read_text())
    assert {name: model.hash for name, model in PRESETS.items()} == published
    one = PRESETS["vip-llava-7b"]
    other = replace(one, vision=replace(one.vision, side_by_side=(0, 1, 2, 3, 4)))
    assert one.hash != other.hash


@pytest.mark.parametrize(("name", "config"), CONFIGS.items(), ids=CONFIGS)
def test_a_published_config_is_the_preset(tmp_path: Path, name: str, config: Fields) -> None:
    found, known = read(tmp_path, config, name), PRESETS[name]
    # Dynamic scaling of the rotation begins behind 32768 tokens: up to there the models are the same.
    if name == "internvl-chat-1.5":
        assert found.language.attentions[0].rope.scaling == RopeScaling("dynamic", 3.0, original_positions=32768)
        assert not [name for name, *_ in differences(found, known) if "rope" in name]
        found = replace(found, language=altered(found.language, scaling=None))
    # No LLaVA folder names its chat template, and no InternVL folder of the first kind its image token.
    prompt = {**asdict(found.prompt), "chat_template": known.prompt.chat_template}
    assert prompt == asdict(known.prompt) | ({"image_token_id": None} if "internvl" in name else {})
    assert str(replace(found, prompt=known.prompt)) == str(known)


def test_drop_path_grows_over_all_layers_also_those_that_do_not_run(tmp_path: Path) -> None:
    """InternVL's own code: from 0 to drop_path_rate over all layers, of which `select_layer` leaves some out."""
    config = changed(INTERNVL_CHAT, {"vision_config.drop_path_rate": 0.44, "select_layer": -12})
    vision = read(tmp_path, config).vision
    assert (vision.layers, vision.drop_path) == (45 - 11, pytest.approx(0.44 * 33 / 44))


def test_a_file_a_folder_and_a_converted_folder_are_the_same_model(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", LLAVA_1_5)
    (tmp_path / "ours").mkdir()
    converted = write(tmp_path / "ours" / "huggingface", LLAVA_1_5)
    models = {str(preset(str(path)).vision) for path in (folder, folder / "config.json", converted.parent)}
    assert len(models) == 1
    assert preset(str(converted.parent)).name == "ours"


@pytest.mark.parametrize(
    "kind", [kind for kind in DEFAULTS if kind not in ("internlm2", "intern_vit_6b", "internvl_chat")]
)
def test_what_a_config_leaves_out_is_what_transformers_fills_in(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(kind)
    theirs.allow_global_per_layer_attribute_access = True  # where layers differ, those that are not named apart
    for field, value in DEFAULTS[kind].items():
        if field in ("image_grid_pinpoints", "sliding_window", "num_key_value_heads"):  # filled in when asked for
            continue
        found = getattr(theirs, field)
        if hasattr(found, "to_dict"):  # a section
            found = {name: getattr(found, name) for name in value}
        assert (list(found) if isinstance(found, tuple) else found) == value, field


REFUSED = [json.loads(line) for line in (HERE / "refused.jsonl").read_text().splitlines()]
"""Of a config above, or of a preset with no more fields than it needs, fields that are changed, and what is said."""
OTHERS = {"internvl": INTERNVL_HF, "qwen2.5-vl-7b, twice": with_fields_twice(QWEN2_5_VL)}


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, name: str, changes: Fields, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        read(tmp_path, changed((OWN | CONFIGS | OTHERS)[name], changes))
    assert "\n" not in str(refusal.value)


def test_all_that_is_in_the_way_is_said_at_once(tmp_path: Path) -> None:
    """In one line, once each, whichever section it is in; what cannot be read on comes last."""
    text = {**QWEN2_5_VL, "attention_dropout": 0.1, "residual_scale": 2.0, "layer_types": ["chunked"], "emb_scale": 3}
    config = {**text, "fp8": True, "rope_scaling": {"mrope_section": [8, 8, 8], "partial_rotary_factor": 0.5, "a": 1}}
    config["vision_config"] = {**QWEN2_5_VL["vision_config"], "in_chans": 1, "hidden_act": "relu"}
    with pytest.raises(UserError) as refusal:
        read(tmp_path, config)
    said = str(refusal.value)
    named = (
        "attention_dropout is 0.1", "residual_scale is '2.0'", "layer_types has others", "emb_scale is '3'", "fp8 is",
        "[8, 8, 8] is not half", "partial rotation", "rotary field 'a'", "in_chans is 1", "hidden_act is 'relu'",
    )  # fmt: skip
    assert f"{len(named)} things are in the way" in said
    assert [said.count(one) for one in named] == [1] * len(named)
    assert said.count(str(tmp_path)) == 1
    assert "\n" not in said


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "fields", "of", "wanted"),
    [
        # The last norm, where the tower is whole and not pooled.
        *((INTERNVL_HF, {"vision_config.use_mean_pooling": pooled, "vision_feature_layer": layer}, "vision.final_norm",
           normed) for pooled, layer, normed in ((True, -1, False), (False, -1, True), (False, -2, False))),
        (OWN["llava-1.6-mistral-7b"], {"text_config.sliding_window": 4096}, "language.max_positions", 4096),
        (GEMMA_3, {"text_config.layer_types": ["full_attention"] * 62}, "language.usual.mixer.window", None),
        # As ViP-LLaVA's files write it; the tower ends with the last of them.
        (OWN["vip-llava-7b"], {"vision_feature_layers": [3, 9]}, "vision.side_by_side", (0, 1)),
        (OWN["vip-llava-7b"], {"vision_feature_layers": [3, 9]}, "vision.layers", 9),
        (LLAVA_1_5, {"text_config.rope_scaling": LLAMA3}, "language.usual.mixer.rope.scaling",
         RopeScaling("llama3", 8.0)),
        # The images' token may be the first.
        (INTERNVL_HF, {"image_token_id": 0}, "prompt.image_token_id", 0),
        (LLAVA_1_5, {"image_token_index": 0}, "prompt.image_token_id", 0),
        (GEMMA_3, {"image_token_index": 0}, "prompt.image_token_id", 0),
    ],
)  # fmt: skip
def test_fields_are_read(tmp_path: Path, config: Fields, fields: Fields, of: str, wanted: Any) -> None:
    assert attrgetter(of)(read(tmp_path, changed(config, fields))) == wanted


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"max_window_layers": 28}, None), ({"max_window_layers": 27}, 4096),  # of 28 layers
        ({}, None), ({"num_hidden_layers": 81}, 4096),  # 80, unless the file says otherwise
        ({"max_window_layers": 0, "layer_types": ["full_attention"] * 28}, None),
        ({"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, 4096),
        ({"max_window_layers": 0, "use_sliding_window": False}, None),
    ],
)  # fmt: skip
def test_a_window_that_no_layer_uses_limits_nothing(tmp_path: Path, fields: Fields, window: int | None) -> None:
    pytest.importorskip("transformers")
    from transformers import Qwen2_5_VLConfig

    text = {"num_hidden_layers": 28, "sliding_window": 4096, "use_sliding_window": True, **fields}
    assert ("sliding_attention" in Qwen2_5_VLConfig(text_config=text).text_config.layer_types) == (window is not None)
    plain = {name: value for name, value in QWEN2_5_VL.items() if name not in text and name != "max_window_layers"}
    assert read(tmp_path, {**plain, **text}).language.max_positions == window


def test_heads_of_gemmas_global_layers_are_read_in_both_spellings(tmp_path: Path) -> None:
    """Published files say them once, transformers writes them layer by layer; the last layer is always global."""
    own = {"head_dim": 512, "num_key_value_heads": 4}
    by_layer = {**GEMMA_4["text_config"], "per_layer_config": {str(layer): own for layer in range(5, 60, 6)}}
    del by_layer["global_head_dim"], by_layer["num_global_key_value_heads"]
    by_layer["layer_types"] = [*by_layer["layer_types"][:-1], "sliding_attention"]
    written = read(tmp_path, {**GEMMA_4, "text_config": by_layer})
    assert written.language == preset("gemma-4-31b").language
    alone = read(tmp_path, changed(GEMMA_4, {"text_config.attention_k_eq_v": False})).language
    far = alone.attentions[-1]
    assert (far.kv_heads, far.head_dim, far.keys_are_values) == (16, 512, False), (
        "as transformers: fewer groups where they are values"
    )


def test_adapters_are_said_to_be_such(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", LLAVA_1_5)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match=r"model: an adapter \(adapter_config\.json\) lies next to the model"):
        preset(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match=r"model: holds an adapter \(adapter_config\.json\) and no model"):
        read_architecture(folder)


def test_rotation_of_gemmas_two_kinds_of_layers_is_read_in_both_spellings(tmp_path: Path) -> None:
    old = {"rope_theta": 2e6, "rope_local_base_freq": 3e4, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    new = {"full_attention": {"rope_type": "linear", "rope_theta": 2e6, "factor": 4.0}}
    new |= {"sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}
    for text in (old, {"rope_parameters": new}):
        plain = {name: value for name, value in GEMMA_3["text_config"].items() if name != "rope_scaling"}
        plain |= {"num_hidden_layers": 5, "sliding_window_pattern": 2, **text}
        language = read(tmp_path, {**GEMMA_3, "text_config": plain}).language
        far, near = (None, Rope(2e6, RopeScaling("linear", 4.0))), (1024, Rope(3e4))
        assert [(one.window, one.rope) for one in language.attentions] == [near, far, near, far, near]


ROTATIONS: list[Fields] = [
    {"rope_scaling": {"rope_type": "default", "rope_theta": 5e6}},
    {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    {"rope_theta": 5e6, "rope_scaling": None, "rope_parameters": {"rope_type": "default"}},
    {"rope_theta": 5e6, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
    {},
]


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize(("config", "kind"), [(LLAVA_1_5, "llama"), (QWEN3_VL, "qwen3_vl_text")])
def test_the_base_of_rotation_is_taken_from_where_transformers_takes_it(
    tmp_path: Path, config: Fields, kind: str, rotation: Fields
) -> None:
    transformers = pytest.importorskip("transformers")
    if kind != "llama" and rotation.get("rope_scaling", {"type": "default"}):
        rotation = {**rotation, "rope_scaling": {"mrope_section": [24, 20, 20], "rope_theta": 5e6}}
    text = {name: value for name, value in config["text_config"].items() if not name.startswith("rope_")}
    folder = write(tmp_path / "model", {**config, "text_config": {**text, **rotation}})
    theirs = transformers.AutoConfig.from_pretrained(folder).text_config.rope_parameters
    assert preset(str(folder)).language.attentions[0].rope.theta == theirs["rope_theta"]


@pytest.mark.parametrize("config", [INTERNVL_CHAT, LLAVA_1_5, QWEN2_5_VL, GEMMA_4, PALIGEMMA])
def test_who_saved_a_config_says_nothing(tmp_path: Path, config: Fields) -> None:
    saved = {"unsloth_fixed": True, "unsloth_version": "2026.4.2", "transformers.js_config": {"dtype": "q4"}}
    inner = {name: {**part, **saved} for name, part in config.items() if name in ("text_config", "vision_config")}
    one, other = read(tmp_path, {**config, **saved, **inner}, "one"), read(tmp_path, config, "other")
    assert replace(one, name="other") == other


@pytest.mark.parametrize(
    "config", [{**QWEN2_5_VL, "model_type": "qwen2_vl", "vision_config": {"hidden_size": 3584}}, QWEN2_5_VL]
)
def test_fields_written_twice_are_read_once(tmp_path: Path, config: Fields) -> None:
    one, other = (read(tmp_path, each, name) for name, each in (("a", config), ("b", with_fields_twice(config))))
    assert replace(one, name="") == replace(other, name="")


def test_no_config_and_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json here"):
        preset(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        preset(str(tmp_path))
    with pytest.raises(UserError, match=r"nowhere/at-all: no such folder; .*`hf download nowhere/at-all"):
        preset("nowhere/at-all")


def test_a_preset_is_its_config_whatever_files_are_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with a head of its own, and GLM-4.6V's processor, in the working directory; a folder obeys both."""
    numpy = pytest.importorskip("safetensors.numpy")
    numpy.save_file({"lm_head.weight": np.zeros((2, 2))}, tmp_path / "model.safetensors")
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Glm46VProcessor"}')
    monkeypatch.chdir(tmp_path)
    names = ("gemma-3-4b", "glm-4.5v")
    assert [read_fields(name, OWN[name], name) for name in names] == [PRESETS[name] for name in names]
    assert PRESETS["gemma-3-4b"].tied
    gemma, glm = (read_fields(name, OWN[name], name, tmp_path) for name in names)
    assert not gemma.tied
    assert glm.prompt.image_markup == "glm-4.6v"


PUBLISHED: dict[str, Fields] = json.loads((HERE / "dumped.json").read_text())
"""What files hold beside: dumps of all settings by older transformers, and what belongs to data and tools."""


@pytest.mark.parametrize("language", ["internlm2", "qwen2"])
def test_what_published_files_hold_beside_is_no_hindrance(tmp_path: Path, language: str) -> None:
    llm = {**INTERNVL_CHAT["llm_config"], **PUBLISHED[language], "model_type": language}
    if language == "qwen2":
        del llm["bias"]
        llm["architectures"] = ["Qwen2ForCausalLM"]
    config = {**INTERNVL_CHAT, **PUBLISHED["internvl_chat"], "llm_config": llm}
    config["vision_config"] = {**INTERNVL_CHAT["vision_config"], **PUBLISHED["vision"]}
    found = read(tmp_path, config)
    assert found.vision == PRESETS["internvl-chat-1.5"].vision
    assert found.prompt.chat_template == "internlm2-chat"


@pytest.mark.parametrize("family", ["internvl", "llava", "llava_next"])
def test_what_transformers_writes_by_itself_is_read(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    for language in ("qwen2", "llama", "mistral"):
        written = transformers.AutoConfig.for_model(family, text_config={"model_type": language})
        written.vision_config.patch_size = [14, 14] if family == "internvl" else 14
        written.save_pretrained(tmp_path)
        read = preset(str(tmp_path))
        assert read.prompt.image_token_id == written.image_token_id
        assert read.language.vocab_size == written.text_config.vocab_size


def test_what_a_model_is_told_changes_no_profile() -> None:
    model = PRESETS["llava-1.5-7b"]
    other = replace(model, prompt=replace(model.prompt, chat_template=None, image_token_id=None))
    assert other.hash == model.hash != replace(model, newline=True).hash


def test_paddleocr_vl_may_have_the_language_models_fields_and_no_section(tmp_path: Path) -> None:
    """As in transformers: its class reads them so, and writes a section."""
    transformers = pytest.importorskip("transformers")
    other = {**PADDLEOCR_VL, "hidden_size": 512, "rope_theta": 7e4, "rms_norm_eps": 1e-3, "num_key_value_heads": 4}
    transformers.PaddleOCRVLConfig(**other).save_pretrained(tmp_path / "saved")
    assert "text_config" in json.loads((tmp_path / "saved/config.json").read_text())
    read, saved = (preset(str(folder)) for folder in (write(tmp_path / "published", other), tmp_path / "saved"))
    attention = read.language.attentions[0]
    assert (read.language.hidden_size, attention.rope.theta, attention.kv_heads) == (512, 7e4, 4)
    assert replace(read, name="") == replace(saved, name="")
