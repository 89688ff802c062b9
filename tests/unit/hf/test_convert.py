"""Weights in and out: bit by bit, under every spelling, streaming, and refused in one line where they do not fit."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.vlm.checkpoint.integrity import seal_by_one_process
from megatron.vlm.hf.checkpoint import OurCheckpoint, write_release
from megatron.vlm.hf.convert import from_hugging_face, to_hugging_face
from megatron.vlm.hf.folder import WeightFolder
from omnibal_ext.architectures.huggingface import read_architecture
from omnibal_ext.errors import UserError
from tests.long import short
from tests.programs import ROOT
from tests.unit.hf import models
from tests.unit.hf.original import write_original

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")


def weights_of(folder: Path) -> dict[str, Tensor]:
    theirs = WeightFolder(folder)
    return {name: theirs.tensor(name) for name in theirs.stored}


def ours_of(folder: Path) -> dict[str, Tensor]:
    ours = OurCheckpoint(folder)
    return {name: ours.tensor(name) for name in ours.weights}


def assert_same(mine: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert mine.keys() == wanted.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == wanted[name].dtype
        bits, wanted_bits = (one.flatten().view(torch.uint8) for one in (tensor, wanted[name]))
        assert torch.equal(bits, wanted_bits), name


@pytest.fixture
def internvl(tmp_path: Path) -> Path:
    folder = tmp_path / "internvl"
    models.build("internvl", seed=1).save_pretrained(folder, max_shard_size="60KB")
    (folder / "tokenizer.json").write_text("{}")
    return folder


TYPES = (torch.float32, torch.bfloat16)


ALONE = [one for one in models.FAMILIES if one not in models.OF_A_KIND]
"""The others come back bit by bit in test_parity.py, by way of two ranks."""
CASES = short(product(models.FAMILIES, TYPES), [(one, TYPES[n % 2]) for n, one in enumerate(ALONE)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_round_trip_keeps_every_bit_file_and_name(tmp_path: Path, case: tuple[str, torch.dtype]) -> None:
    family, dtype = case
    models.build(family, seed=1).to(dtype).save_pretrained(tmp_path / "theirs", max_shard_size="60KB")
    there_and_back(tmp_path / "theirs", tmp_path)
    before, after = WeightFolder(tmp_path / "theirs"), WeightFolder(tmp_path / "back")
    assert after.stored == before.stored
    files = sorted({entry.file for entry in before.stored.values()})
    assert len(files) > 1
    assert_same(weights_of(tmp_path / "back"), weights_of(tmp_path / "theirs"))
    first = {name: before.tensor(name) for name, entry in before.stored.items() if entry.file == files[0]}
    assert_same(safetensors.load_file(tmp_path / "back" / files[0]), first)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype", None])
def test_the_config_says_the_type_that_the_weights_have(internvl: Path, tmp_path: Path, field: str | None) -> None:
    """A run in bf16 that began with a folder in fp32: wherever the folder said it, else at the head."""
    config = json.loads((internvl / "config.json").read_text())
    sections = [config, config["text_config"], config["vision_config"]]
    for section in sections:
        section.update({name: None for name in ("dtype", "torch_dtype") if name in section})
        section.update({field: "float32"} if field else {})
    (internvl / "config.json").write_text(json.dumps(config))
    from_hugging_face(internvl, tmp_path / "ours")
    whole = OurCheckpoint(tmp_path / "ours")
    half = {name: whole.tensor(name).bfloat16() for name in whole.weights}
    write_release(tmp_path / "run", {name: tensor.to("meta") for name, tensor in half.items()}, half.__getitem__)
    for run, name in (("ours", "float32"), ("run", "bfloat16")):
        to_hugging_face(tmp_path / run, tmp_path / f"{run}-back", like=tmp_path / "ours")
        found = json.loads((tmp_path / f"{run}-back/config.json").read_text())
        wanted = field or "dtype"
        assert found[wanted] == name
        inner = (found["text_config"], found["vision_config"])
        assert {section.get(wanted) for section in inner} == ({name} if field else {None})
        loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / f"{run}-back", dtype="auto")
        assert {str(weight.dtype) for weight in loaded.parameters()} == {f"torch.{name}"}


def test_weights_of_several_types_go_back_each_in_its_own(internvl: Path, tmp_path: Path) -> None:
    """Query in bf16, key and value in fp32 are one weight of ours; what a run has trained is of one type."""
    for file in internvl.glob("*.safetensors"):
        tensors = safetensors.load_file(file)
        tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items() if "q_proj" in name or "fc1" in name}
        safetensors.save_file(tensors, file, {"format": "pt"})
    there_and_back(internvl, tmp_path)
    assert_same(weights_of(tmp_path / "back"), weights_of(internvl))
    assert {tensor.dtype for tensor in weights_of(internvl).values()} == {torch.float32, torch.bfloat16}
    shutil.copytree(tmp_path / "ours/release", tmp_path / "run/iter_0000007")
    (tmp_path / "run/iter_0000007/integrity.json").unlink()
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("7")
    seal_by_one_process(tmp_path / "run/iter_0000007", {})
    to_hugging_face(tmp_path / "run", tmp_path / "trained", like=internvl)
    trained = weights_of(tmp_path / "trained")
    assert all(trained[name].dtype == torch.float32 for name in trained if "q_proj" in name)


def test_transformers_loads_what_goes_back(internvl: Path, tmp_path: Path) -> None:
    there_and_back(internvl, tmp_path)
    assert (tmp_path / "back" / "tokenizer.json").exists()
    load = transformers.AutoModelForImageTextToText.from_pretrained
    loaded, report = load(tmp_path / "back", output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    assert_same(dict(loaded.state_dict()), dict(load(internvl).state_dict()))


@pytest.mark.parametrize(
    ("family", "internlm2"),
    [("internvl", False), ("internvl qk-norm rmsnorm", True), ("internvl qwen3-moe", False)],
    ids=["qwen2", "internlm2", "qwen3-moe"],
)
def test_the_original_internvl_gives_the_same_weights(tmp_path: Path, family: str, internlm2: bool) -> None:
    models.build(family, seed=2).save_pretrained(tmp_path / "theirs")
    write_original(weights_of(tmp_path / "theirs"), tmp_path / "original", internlm2, qk_norm=internlm2)
    from_hugging_face(tmp_path / "theirs", tmp_path / "a")
    from_hugging_face(tmp_path / "original", tmp_path / "b")
    assert_same(ours_of(tmp_path / "b"), ours_of(tmp_path / "a"))
    to_hugging_face(tmp_path / "b", tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), weights_of(tmp_path / "original"))
    one, other = (read_architecture(tmp_path / name) for name in ("theirs", "original"))
    assert (one.vision, one.language, one.shuffle) == (other.vision, other.language, other.shuffle)


def assert_experts_convert_alike(tmp_path: Path, published: dict[str, Tensor]) -> None:
    """These weights, and those that transformers has saved of the same model."""
    (tmp_path / "published").mkdir()
    safetensors.save_file(published, tmp_path / "published/model.safetensors", {"format": "pt"})
    shutil.copyfile(tmp_path / "saved/config.json", tmp_path / "published/config.json")
    for name in ("saved", "published"):
        from_hugging_face(tmp_path / name, tmp_path / f"ours_{name}")
        to_hugging_face(tmp_path / f"ours_{name}", tmp_path / f"back_{name}")
        assert_same(weights_of(tmp_path / f"back_{name}"), weights_of(tmp_path / name))
    assert_same(ours_of(tmp_path / "ours_published"), ours_of(tmp_path / "ours_saved"))


def test_experts_lie_either_way_as_transformers_reads_them(tmp_path: Path) -> None:
    """Published files hold matrices of experts [in, out], and transformers 5 saves them [out, in]."""
    models.build("qwen3-vl-moe", seed=2).save_pretrained(tmp_path / "saved")
    weights = weights_of(tmp_path / "saved")
    turned = {name: weight.mT.contiguous() for name, weight in weights.items() if ".experts." in name}
    assert len(turned) == 6
    assert_experts_convert_alike(tmp_path, {**weights, **turned})
    load = transformers.AutoModelForImageTextToText.from_pretrained
    read, saved = (dict(load(tmp_path / name).state_dict()) for name in ("published", "saved"))
    assert_same(read, saved)


def test_experts_lie_together_as_published_or_apart_as_transformers_saves_them(tmp_path: Path) -> None:
    """And layers that predict several tokens, which a model of transformers does not have, come back."""
    model = models.build("qwen3.5-moe", seed=2)
    model.save_pretrained(tmp_path / "saved")
    weights = {name: weight for name, weight in weights_of(tmp_path / "saved").items() if ".experts." not in name}
    weights |= {name: weight.detach().clone() for name, weight in model.state_dict().items() if ".experts." in name}
    weights["mtp.layers.0.mlp.experts.0.down_proj.weight"] = torch.ones(3, 2)
    assert_experts_convert_alike(tmp_path, weights)


@pytest.mark.parametrize(
    ("family", "tower"), [("llava-next vicuna", "vision_tower."), ("deepseek-vl", "vision_model.")]
)
def test_other_spellings_are_the_same_model(tmp_path: Path, family: str, tower: str) -> None:
    """Names as in memory, and with the inner `vision_model` that older checkpoints have."""
    model = models.build(family, seed=3)
    model.save_pretrained(tmp_path / "theirs")
    spelled = {name.replace(tower, f"{tower}vision_model."): weight.detach().clone()
               for name, weight in model.state_dict().items() if "position_ids" not in name}  # fmt: skip
    (tmp_path / "spelled").mkdir()
    safetensors.save_file(spelled, tmp_path / "spelled" / "model.safetensors")
    (tmp_path / "spelled" / "config.json").write_text((tmp_path / "theirs" / "config.json").read_text())
    for name in ("theirs", "spelled"):
        from_hugging_face(tmp_path / name, tmp_path / f"ours_{name}")
    assert_same(ours_of(tmp_path / "ours_spelled"), ours_of(tmp_path / "ours_theirs"))
    to_hugging_face(tmp_path / "ours_spelled", tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), spelled)


def test_a_whole_omni_is_its_thinker_and_comes_back_with_what_it_hears_and_says(tmp_path: Path) -> None:
    thinker, whole = tmp_path / "thinker", tmp_path / "whole"
    models.build("qwen2.5-omni", seed=1).save_pretrained(thinker)
    weights = {f"thinker.{name}": weight for name, weight in weights_of(thinker).items()}
    weights |= {"talker.model.norm.weight": torch.ones(3), "token2wav.bias": torch.zeros(2)}
    whole.mkdir()
    for name in ("spk_dict.pt", "training_args.bin"):  # the talker's voices, which transformers' class loads
        (whole / name).write_bytes(b"of " + name.encode())
    safetensors.save_file(weights, whole / "model.safetensors")
    config = json.loads((thinker / "config.json").read_text())
    said = {"talker_config": {"model_type": "qwen2_5_omni_talker"}, "enable_audio_output": True}
    (whole / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": config, **said}))
    for folder in (thinker, whole):
        from_hugging_face(folder, tmp_path / f"ours_{folder.name}")
    assert replace(read_architecture(whole), name="thinker") == read_architecture(thinker)
    assert_same(ours_of(tmp_path / "ours_whole"), ours_of(tmp_path / "ours_thinker"))
    to_hugging_face(tmp_path / "ours_whole", tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), weights)
    assert (tmp_path / "back/spk_dict.pt").read_bytes() == b"of spk_dict.pt"
    assert not (tmp_path / "back/training_args.bin").exists()
    (whole / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": {**config, "x": 1}}))
    with pytest.raises(UserError, match=r"thinker_config\.x is '1', which is not known"):
        read_architecture(whole)


@pytest.mark.parametrize("kind", ["internvl", "llava", "qwen3-vl", "qwen2.5-omni", "qwen3-omni"])
@pytest.mark.parametrize("is_whole", [False, True])
def test_a_head_in_the_weights_overrides_tied_embeddings(tmp_path: Path, kind: str, is_whole: bool) -> None:
    if is_whole and "omni" not in kind:
        pytest.skip("is no part of a larger model")
    theirs = tmp_path / "theirs"
    models.build(kind, seed=1).save_pretrained(theirs)
    config, weights = json.loads((theirs / "config.json").read_text()), weights_of(theirs)
    config["tie_word_embeddings"] = True
    if is_whole:
        config = {"model_type": config["model_type"].removesuffix("_thinker"), "thinker_config": config}
        weights = {f"thinker.{name}": weight for name, weight in weights.items()}
        safetensors.save_file(weights, theirs / "model.safetensors")
    (theirs / "config.json").write_text(json.dumps(config))
    from_hugging_face(theirs, tmp_path / "ours")
    assert not read_architecture(tmp_path / "ours").tied
    assert "links.head.linear.weight" in OurCheckpoint(tmp_path / "ours").weights
    to_hugging_face(tmp_path / "ours", tmp_path / "back")
    assert_same(weights_of(tmp_path / "back"), weights)
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert written.get("thinker_config", written)["tie_word_embeddings"] is False


@pytest.mark.parametrize("said", [{0}, {1}, {2}, {0, 1}, {0, 2}, {1, 2}, {0, 1, 2}])
def test_an_export_generates_by_the_settings_that_its_original_generates_by(tmp_path: Path, said: set[int]) -> None:
    """Wherever they stand: in their own file, in config.json, or in its language model."""
    theirs = tmp_path / "theirs"
    models.build("llava", seed=1).save_pretrained(theirs)
    (theirs / "generation_config.json").unlink()
    config = json.loads((theirs / "config.json").read_text())
    settings = [
        {"eos_token_id": 3 + place, "repetition_penalty": 1.5 + place, "max_length": 30 + place} for place in range(3)
    ]
    if 0 in said:
        (theirs / "generation_config.json").write_text(json.dumps(settings[0]))
    config |= settings[1] if 1 in said else {}
    config["text_config"] |= settings[2] if 2 in said else {}
    (theirs / "config.json").write_text(json.dumps(config))
    there_and_back(theirs, tmp_path)
    before, after = (
        transformers.AutoModelForImageTextToText.from_pretrained(folder).generation_config.to_dict()
        for folder in (theirs, tmp_path / "back")
    )
    assert after == before


OF_EACH_CLASS = list({prefix: kind for kind, (prefix, *_) in models.FAMILIES.items()}.values())


@pytest.mark.parametrize("kind", OF_EACH_CLASS)
def test_an_export_is_opened_by_the_class_that_its_config_names_and_generates(tmp_path: Path, kind: str) -> None:
    model = models.build(kind, seed=1)
    model.save_pretrained(tmp_path / "theirs")
    there_and_back(tmp_path / "theirs", tmp_path)
    named = json.loads((tmp_path / "back/config.json").read_text())["architectures"]
    assert named == [type(model).__name__]
    opened = getattr(transformers, named[0]).from_pretrained(tmp_path / "back")
    asked = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "max_new_tokens": 3, "do_sample": False}
    assert opened.generate(**asked).tolist() == model.eval().generate(**asked).tolist()


STACK = re.compile(r"(.*?\.(?:layers?|blocks))\.(\d+)\..*")


def stacks(weights: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The name of each stack of layers -> the number of its last one."""
    found = [match for name in weights if (match := STACK.fullmatch(name))]
    return {match[1]: max(int(other[2]) for other in found if other[1] == match[1]) for match in found}


STACKED = short(OF_EACH_CLASS, (
    "internvl qwen3-moe, weights of experts as they are", "llava of several layers, with class token", "video-llava",
    "gemma 4 with a ViT that clamps, heads that two ranks do not share evenly", "smolvlm tied, odd patches",
    "glm-4.5v, groups of experts, two dense layers", "glm ocr without biases, tied", "paddleocr-vl tied", "qwen3-omni",
))  # fmt: skip
"""One of each way in which stacks of layers are named, or one is not read to its end."""


@pytest.mark.parametrize("kind", STACKED)
def test_a_layer_more_than_the_config_says_is_refused(tmp_path: Path, kind: str) -> None:
    """Of the language model and of each encoder; GLM's last one, if it predicts a second token, comes back."""
    folder = tmp_path / "theirs"
    models.build(kind, seed=1).save_pretrained(folder)
    weights = weights_of(folder)
    for stack, last in stacks(weights).items():
        of_last = {name: weight for name, weight in weights.items() if name.startswith(f"{stack}.{last}.")}
        more = {name.replace(f"{stack}.{last}.", f"{stack}.{last + 1}.", 1): one for name, one in of_last.items()}
        change_weights(folder, more)
        with pytest.raises(UserError, match=rf"the model has no place for, .*\.{last + 1}\."):
            from_hugging_face(folder, tmp_path / "ours")
        if "Glm" in models.FAMILIES[kind][0] and "visual" not in stack:
            more[f"{stack}.{last + 1}.eh_proj.weight"] = torch.zeros(2, 4)
            change_weights(folder, more)
            from_hugging_face(folder, tmp_path / "ours")
            to_hugging_face(tmp_path / "ours", tmp_path / "back")
            assert more.keys() <= weights_of(tmp_path / "back").keys()
        change_weights(folder, dict.fromkeys(more))


@pytest.mark.parametrize("kind", STACKED)
def test_a_layer_less_than_the_config_says_is_refused(tmp_path: Path, kind: str) -> None:
    """But for a ViT's behind the last that is read, which no export needs."""
    folder = tmp_path / "theirs"
    models.build(kind, seed=1).save_pretrained(folder)
    weights = weights_of(folder)
    unread = read_architecture(folder).vision.unread
    for stack, last in stacks(weights).items():
        less = {name: weight for name, weight in weights.items() if name.startswith(f"{stack}.{last}.")}
        change_weights(folder, dict.fromkeys(less))
        if unread and re.search("vision|image_tower|video_tower", stack):
            from_hugging_face(folder, tmp_path / f"ours of {stack}")
        else:
            with pytest.raises(UserError, match=r"lacks \d+ weights that its config.json asks for"):
                from_hugging_face(folder, tmp_path / "ours")
        change_weights(folder, less)


@pytest.mark.parametrize("kind", ["internvl", "llava"])
def test_a_weight_that_a_layer_of_the_vit_has_not_is_refused(tmp_path: Path, kind: str) -> None:
    models.build(kind, seed=1).save_pretrained(tmp_path / "theirs")
    first = next(name for name in weights_of(tmp_path / "theirs") if re.search(r"encoder\.layers?\.0\..*weight$", name))
    stem = first[: first.index(".0.") + 3]
    change_weights(tmp_path / "theirs", {f"{stem}attention.other_norm.weight": torch.ones(4)})
    with pytest.raises(UserError, match="the model has no place for"):
        from_hugging_face(tmp_path / "theirs", tmp_path / "ours")


def test_a_vit_layer_that_is_not_read_and_one_that_nobody_named(tmp_path: Path) -> None:
    """One layer less in config.json would move the features that are read from the end."""
    folder = tmp_path / "theirs"
    models.build("llava", seed=1).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    assert read_architecture(folder).vision.unread == 1
    config["vision_config"]["num_hidden_layers"] -= 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="the model has no place for"):
        from_hugging_face(folder, tmp_path / "ours")


LIMITED = """
import re, resource, sys
from pathlib import Path
from tests.unit.hf.test_convert import there_and_back
small, large, output = map(Path, sys.argv[1:4])
there_and_back(small, output / "warm")  # what is imported on first use is there now
taken = 1024 * int(re.search(r"VmData:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
resource.setrlimit(resource.RLIMIT_DATA, (taken + int(sys.argv[4]),) * 2)
there_and_back(large, output / "large")
"""


@pytest.mark.starts
def test_conversion_holds_a_weight_and_not_the_model(internvl: Path, tmp_path: Path) -> None:
    """In a process that may write to no more memory than a third of the model, and hands every freed array back."""
    text = {**models.QWEN, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8}
    make_config, make_model = models.classes("internvl")
    config = make_config(vision_config=models.INTERN_VIT, text_config=text, image_token_id=models.IMAGE_TOKEN)
    make_model(config).save_pretrained(tmp_path / "theirs", max_shard_size="20MB")
    whole = sum(entry.bytes for entry in WeightFolder(tmp_path / "theirs").stored.values())
    assert whole > 2.5e8
    command = [sys.executable, "-c", LIMITED, internvl, tmp_path / "theirs", tmp_path, str(whole // 3)]
    variables = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    subprocess.run(command, cwd=ROOT, env=variables, check=True, timeout=1000)


def there_and_back(theirs: Path, folder: Path) -> None:
    from_hugging_face(theirs, folder / "ours")
    to_hugging_face(folder / "ours", folder / "back")


def change_weights(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Rewrite a folder as one file with some weights replaced, added or (None) left out."""
    weights = {**weights_of(folder), **change}
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    kept = {name: weight for name, weight in weights.items() if weight is not None}
    safetensors.save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"language_model.model.norm.weight": None}, r"lacks 1 weights .* language_model\.model\.norm\.weight"),
        ({"language_model.model.layers.0.adapter": torch.ones(3)}, r"no place for, language_model\.model\.layers\.0\."),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    internvl: Path, tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    change_weights(internvl, change)
    with pytest.raises(UserError, match=message):
        from_hugging_face(internvl, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_keys_of_layers_that_take_those_of_others_are_kept_aside(tmp_path: Path) -> None:
    """Published files of Gemma 4 E2B have some, which transformers does not load."""
    folder, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    models.build("gemma 4 with inputs of layers", seed=3).save_pretrained(folder)
    (query,) = (name for name in weights_of(folder) if name.endswith("layers.3.self_attn.q_proj.weight"))
    more = {query.replace("q_proj", one): torch.randn(24, 48) for one in ("k_proj", "v_proj")}
    change_weights(folder, more | {query.replace("q_proj", "k_norm"): torch.randn(12)})
    from_hugging_face(folder, ours)
    to_hugging_face(ours, back)
    assert_same(weights_of(back), weights_of(folder))
    assert torch.equal(ours_of(ours)["links.llm_3.self_attention.linear_qkv.weight"], weights_of(folder)[query])


def test_a_weight_that_layers_cannot_share_out_is_refused(tmp_path: Path) -> None:
    """Inputs of five layers, 12 numbers each, lie in one weight of Gemma 4 E2B's."""
    folder = tmp_path / "theirs"
    models.build("gemma 4 with inputs of layers", seed=3).save_pretrained(folder)
    weights = weights_of(folder)
    (table,) = (name for name in weights if name.endswith("embed_tokens_per_layer.weight"))
    for columns in (59, 55):
        change_weights(folder, {table: weights[table][:, :columns].contiguous()})
        with pytest.raises(UserError, match=rf"embed_tokens_per_layer\.weight \[\d+, {columns}\]: .* another model"):
            from_hugging_face(folder, tmp_path / "ours")


def test_damaged_and_absent_files_are_refused(internvl: Path, tmp_path: Path) -> None:
    file = sorted(internvl.glob("*.safetensors"))[2]
    content = file.read_bytes()
    for damaged, message in ((content[:-10], "its header asks for"), (b"\xff" * 4, "is no safetensors file")):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=message):
            from_hugging_face(internvl, tmp_path / "ours")
    file.unlink()
    with pytest.raises(UserError, match=rf"lacks \d+ weights .* first \(in {file.name}, .*; download it again"):
        from_hugging_face(internvl, tmp_path / "ours")


def name_in_index(folder: Path, more: dict[str, str]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= more
    path.write_text(json.dumps(index))


def test_an_index_may_name_weights_that_nobody_needs_and_nobody_has(internvl: Path, tmp_path: Path) -> None:
    """As one is that was taken over from a model with more layers; and with a head of its own, where it is tied."""
    wanted = weights_of(internvl)
    first = sorted(internvl.glob("*.safetensors"))[0].name
    name_in_index(internvl, {"mtp.layers.0.weight": first, "mtp.norm.weight": "model-00099-of-00099.safetensors"})
    there_and_back(internvl, tmp_path)
    assert_same(weights_of(tmp_path / "back"), wanted)
    models.build("llava-onevision tied", seed=1).save_pretrained(tmp_path / "tied", max_shard_size="60KB")
    name_in_index(tmp_path / "tied", {"lm_head.weight": sorted((tmp_path / "tied").glob("*.safetensors"))[0].name})
    assert read_architecture(tmp_path / "tied").tied
    from_hugging_face(tmp_path / "tied", tmp_path / "ours tied")


def test_a_needed_weight_that_no_file_holds_is_refused_by_its_name(internvl: Path, tmp_path: Path) -> None:
    index = json.loads((internvl / "model.safetensors.index.json").read_text())["weight_map"]
    (name,) = [name for name in index if name.endswith("model.norm.weight")]
    file = internvl / index[name]
    kept = {one: weight for one, weight in safetensors.load_file(file).items() if one != name}
    safetensors.save_file(kept, file)
    with pytest.raises(UserError, match=rf"lacks 1 weights .*norm\.weight first \(in {file.name}, .*index.*download"):
        from_hugging_face(internvl, tmp_path / "ours")


def test_architectures_that_are_no_names_are_refused_in_every_family(tmp_path: Path) -> None:
    """Where a Qwen-VL's part is read whatever it says: its weights' names go by it too."""
    models.build("qwen2-vl", seed=1).save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs/config.json"
    config = json.loads(file.read_text())
    config["text_config"]["architectures"] = True
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config\.json\.text_config\.architectures must be"):
        from_hugging_face(tmp_path / "theirs", tmp_path / "ours")


def test_nothing_is_overwritten_and_no_model_is_made_up(internvl: Path, tmp_path: Path) -> None:
    from_hugging_face(internvl, tmp_path / "ours")
    with pytest.raises(UserError, match="is not empty"):
        from_hugging_face(internvl, tmp_path / "ours")
    with pytest.raises(UserError, match="no checkpoint here"):
        to_hugging_face(internvl, tmp_path / "back")
    for path in (tmp_path / "ours" / "huggingface").iterdir():
        path.unlink()
    with pytest.raises(UserError, match="--like"):
        to_hugging_face(tmp_path / "ours", tmp_path / "back")
    models.build("llava", seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match="another model"):
        to_hugging_face(tmp_path / "ours", tmp_path / "back", like=tmp_path / "other")
