"""Random folders of every family, each field of their configs varied: read as transformers reads them, or refused.

python -m torch.distributed.run --nproc-per-node 1 -m tests.endurance.folders [--count 300] [--seed 0]

1. A family of `tests.unit.hf.models` is drawn, and some fields of transformers' config classes, of any section, get
   other values; transformers builds a small random model and saves its folder. What it does not build is passed over.
2. The saved config.json is spelled otherwise, as published and as versions 4.45 to 5 of transformers write it
   (`SPELLINGS`).
3. Transformers loads the folder, and so do we. We refuse it, in one line, or the logits of one pack are those of
   transformers sample by sample to `TOLERANCE`.
"""

import argparse
import json
import random
import tempfile
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.vlm.hf.convert import from_hugging_face
from megatron.vlm.single import single_process
from omnibal_ext.architectures.presets import preset
from omnibal_ext.errors import UserError
from tests.unit.hf import models, parity

TOLERANCE = 1e-4
KEPT = {
    "vocab_size", "image_token_id", "image_token_index", "video_token_id", "audio_token_id", "vision_start_token_id",
    "model_type", "image_seq_length",
}  # fmt: skip
"""What the samples are made for, and what a family is."""
WORDS = {
    "hidden_act": ["silu", "gelu", "quick_gelu", "gelu_pytorch_tanh", "relu"],
    "hidden_activation": ["gelu_pytorch_tanh", "gelu"],
    "norm_type": ["layer_norm", "rms_norm"],
    "vision_feature_select_strategy": ["default", "full"],
}
NUMBERS = {
    "hidden_size": [32, 48, 60], "intermediate_size": [40, 96], "num_hidden_layers": [1, 2, 3], "depth": [1, 2, 3],
    "num_attention_heads": [2, 3, 4, 6], "num_heads": [2, 4, 6], "num_key_value_heads": [1, 2, 4],
    "head_dim": [8, 10, 16],
    "sliding_window": [1, 5, 400, None], "max_window_layers": [0, 1, 9], "max_position_embeddings": [9, 64, 512],
    "image_size": [16, 19, 24], "patch_size": [4, 8], "rope_theta": [100.0, 1e6], "num_experts_per_tok": [1, 2, 6],
    "window_size": [8, 16, 24], "mm_tokens_per_image": [1, 4, 16], "downsample_ratio": [0.25, 0.5, 1.0],
    "attn_logit_softcapping": [0.5, None], "final_logit_softcapping": [2.0, None], "projection_dim": [48, 32],
    "vision_feature_layer": [-1, -2, 1, 2, [-1, -2]], "num_position_embeddings": [4, 25],
    "query_pre_attn_scalar": [7, 16], "linear_num_key_heads": [1, 2, 4], "linear_num_value_heads": [4, 8],
    "linear_key_head_dim": [7, 16], "linear_value_head_dim": [7, 16], "linear_conv_kernel_dim": [1, 2, 4],
    "shared_expert_intermediate_size": [8, 40], "full_attention_interval": [1, 2],
    "n_group": [1, 2, 3], "topk_group": [1, 2], "n_routed_experts": [4, 6], "n_shared_experts": [0, 1, 2],
    "first_k_dense_replace": [0, 1, 2, 3], "routed_scaling_factor": [1.0, 2.5], "out_hidden_size": [48, 60],
    "num_kv_shared_layers": [0, 1, 2, 3], "hidden_size_per_layer_input": [0, 6, 9], "pad_token_id": [0, 5, None],
    "vocab_size_per_layer_input": [models.VOCABULARY - 1, models.VOCABULARY],
}  # fmt: skip
ROTATIONS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "attention_factor": 1.7},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "truncate": False, "beta_fast": 9.0},
    {**models.LLAMA3_SCALING, "factor": 3.0},
    {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
]


MROPE = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")
"""What the rotation keeps, whatever else it gets."""


class NotBuiltError(Exception):
    """Transformers itself makes no model of it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    fates: Counter[str] = Counter()
    wrong = []
    with single_process("tiny", ["--ckpt-format", "torch_dist", "--no-gradient-accumulation-fusion"]) as inputs:
        for number in range(arguments.seed, arguments.seed + arguments.count):
            with tempfile.TemporaryDirectory() as folder:
                fate, detail = tried(number, Path(folder), inputs.args)
            fates[fate] += 1
            if fate == "wrong":
                wrong.append(f"seed {number}: {detail}")
    print("RESULT " + json.dumps({"fates": fates, "wrong": wrong}))


def tried(seed: int, folder: Path, args: Namespace) -> tuple[str, str]:
    """What became of one folder: `not built` by transformers, `refused` by us, `equal`, or `wrong`; and why."""
    draw = random.Random(seed)
    family = draw.choice(list(models.FAMILIES))
    try:
        what = f"{family}, {', '.join(written(draw, family, folder / 'theirs'))}"
        theirs = loaded(folder / "theirs")
    except NotBuiltError as error:
        return "not built", str(error)
    try:
        architecture = preset(str(folder / "theirs"))
        from_hugging_face(folder / "theirs", folder / "ours")
    except UserError as error:
        return ("wrong", f"{what}: {error}") if "\n" in str(error) else ("refused", str(error))
    except Exception as error:  # a traceback to whoever gives such a folder
        return "wrong", f"{what}: {error!r}"
    batch, samples = parity.packed(architecture)
    try:
        expected, _ = parity.reference(theirs, samples)
    except Exception as error:  # whatever it stumbles over
        return "not built", f"{what}: {error}"
    limit = architecture.language.max_positions
    if limit is not None and max(batch.lengths) > limit:
        return "refused", f"samples are longer than {limit}"
    with torch.no_grad():
        logits = parity.load(architecture, folder / "ours", args)(replace(batch, labels=None))
    difference = (logits[:, : models.VOCABULARY] - expected).abs().max().item()
    return ("equal", "") if difference < TOLERANCE else ("wrong", f"{what}: logits differ by {difference:.3g}")


def written(draw: random.Random, family: str, folder: Path) -> list[str]:
    """Write a model with some fields of its config changed; returns what was done. Raises `NotBuiltError`."""
    make_config, make_model = models.classes(family)
    try:
        whole = make_config(**models.config_fields(family)).to_dict()
        said = [changed(draw, whole) for _ in range(draw.randint(0, 5))]
        models.randomised(make_model(make_config(**whole)), draw.randrange(99)).save_pretrained(folder)
    except Exception as error:  # whatever it stumbles over
        raise NotBuiltError(str(error)) from error
    file = folder / "config.json"
    config = json.loads(file.read_text())
    said += respelled(draw, config)
    file.write_text(json.dumps(config))
    return said


def loaded(folder: Path) -> torch.nn.Module:
    """What transformers makes of the folder. Raises `NotBuiltError`."""
    from transformers import AutoModelForImageTextToText

    try:
        model, report = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    except Exception as error:  # whatever it stumbles over
        raise NotBuiltError(str(error)) from error
    if missing := report["missing_keys"]:
        raise NotBuiltError(f"random weights where the folder has none: {sorted(missing)[:3]}")
    return model.eval()


def changed(draw: random.Random, whole: dict[str, Any]) -> str:
    """Give a field of some section another value; returns what was done."""
    name = draw.choice(("", "text_config", "text_config", "vision_config"))
    section = whole[name] if name else whole
    fields = sorted(set(section) - KEPT - {"text_config", "vision_config"})
    known = [field for field in fields if field in WORDS or field in NUMBERS or field.startswith("rope")]
    field = draw.choice(draw.choice([fields, known or fields]))
    section[field] = another(draw, field, section[field])
    return f"{name}.{field}={section[field]!r}"


def another(draw: random.Random, field: str, value: Any) -> Any:
    """A value that a field may have: one of those known for it, or one of its kind."""
    if field == "rope_parameters" and isinstance(value, dict) and "rope_type" in value:
        kept = {name: value[name] for name in MROPE if name in value}
        return {"rope_theta": draw.choice([1e4, 1e6, 77.0]), **kept, **draw.choice(ROTATIONS)}
    if field == "layer_types" and value:
        other = "linear_attention" if "linear_attention" in value else "sliding_attention"
        return [draw.choice(("full_attention", other)) for _ in value]
    if field in WORDS or field in NUMBERS:
        return draw.choice(WORDS.get(field) or NUMBERS[field])
    return draw.choice(_near(value))


def _near(value: Any) -> list[Any]:
    match value:
        case bool():
            return [not value]
        case int() | float():
            return [0, 1, 2 * value, value / 2 if isinstance(value, float) else value + 1]
        case list():
            return [value[::-1], value[:-1], value * 2]
        case None:
            return [True, 1, 0.1]
        case _:
            return [value]


def respelled(draw: random.Random, config: dict[str, Any]) -> list[str]:
    """Write a saved config.json otherwise, as other versions of transformers have it; returns what was done."""
    said = [spell.__name__ for spell in SPELLINGS if draw.random() < 0.4 and spell(draw, config)]
    for section in (config, config.get("text_config", {}), config.get("vision_config", {})):
        for name in [name for name, value in section.items() if value is None]:
            del section[name]
    return said


def _older_rotation(draw: random.Random, config: dict[str, Any]) -> bool:
    """Before 5.0: what scales it apart from its base, of Qwen-VL by another name, of Gemma 3 for its two kinds."""
    text = config["text_config"]
    rope = text.pop("rope_parameters", None)
    if not isinstance(rope, dict):
        return False
    if "rope_type" not in rope:
        far, near = rope["full_attention"], rope["sliding_attention"]
        text |= {"rope_theta": far.pop("rope_theta"), "rope_local_base_freq": near["rope_theta"], "rope_scaling": far}
        return True
    if "rope_theta" in rope and draw.random() < 0.7:
        text["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = "mrope" if "mrope_section" in rope and rope["rope_type"] == "default" else rope["rope_type"]
    if "partial_rotary_factor" in rope and draw.random() < 0.7:
        text["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    text["rope_scaling"] = rope
    return True


def _fields_twice(draw: random.Random, config: dict[str, Any]) -> bool:
    """4.52 to 4.55: Qwen-VL's language model on both levels."""
    if config["model_type"] not in ("qwen2_vl", "qwen2_5_vl"):
        return False
    config |= {name: value for name, value in config["text_config"].items() if name != "model_type"} | config
    return True


def _one_level(draw: random.Random, config: dict[str, Any]) -> bool:
    """As published: Qwen2-VL's and Qwen2.5-VL's language model between the other fields."""
    if not _fields_twice(draw, config):
        return False
    del config["text_config"]
    return True


def _type_of_tower(draw: random.Random, config: dict[str, Any]) -> bool:
    """4.49 to 4.57: Qwen-VL's tower by the model's type."""
    if not config["model_type"].startswith("qwen"):
        return False
    config["vision_config"]["model_type"] = config["model_type"]
    return True


def _torch_dtype(draw: random.Random, config: dict[str, Any]) -> bool:
    """Before 4.56."""
    for section in (config, config.get("text_config", {}), config["vision_config"]):
        section["torch_dtype"] = section.pop("dtype", "float32")
    return True


def _all_of_generation(draw: random.Random, config: dict[str, Any]) -> bool:
    """4.x wrote in every section what only generation and other heads read."""
    usual = {
        "top_k": 50, "temperature": 1.0, "length_penalty": 1.0, "num_beams": 1, "max_length": 20, "torchscript": False,
        "id2label": {"0": "LABEL_0"}, "use_bfloat16": False, "_attn_implementation_autoset": True, "do_sample": False,
    }  # fmt: skip
    for section in (config, config.get("text_config", {}), config["vision_config"]):
        section.update({name: value for name, value in usual.items() if name not in section})
    return True


SPELLINGS = (_older_rotation, _type_of_tower, _torch_dtype, _all_of_generation, _fields_twice, _one_level)


if __name__ == "__main__":
    main()
