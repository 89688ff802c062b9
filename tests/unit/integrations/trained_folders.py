"""Folders of small random models, with tokenizer, processor and chat template, for programs inside trainers: a LLaVA
with 16 tokens an image, and a Qwen2.5-VL; and conversations of up to two images. Nothing of `tests` is imported, whose
package readies torch for Megatron."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

TURNS = (
    "{% for turn in messages %}<|im_start|>{{ turn['role'] }}\n{% for part in turn['content'] %}{% if part['type'] == "
    "'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
)
TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 320}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 48}


def tokenizer_of(special: list[str], **roles: str) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<|im_start|>", "<|im_end|>", "<pad>", *special])
    marks = {"eos_token": "<|im_end|>", "pad_token": "<pad>", "extra_special_tokens": roles}
    return PreTrainedTokenizerFast(tokenizer_object=made, **marks)


def save(folder: Path, model: Any, processor: Any) -> Path:
    """With numbers of a hundredth in every bias and a tenth in every matrix, so that each sample has a gradient."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.data.add_(0.1 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def llava(folder: Path) -> Path:
    import transformers as hf

    tokenizer = tokenizer_of(["<image>"], image_token="<image>")
    pictures = hf.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    vision = {**VISION, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
    config = hf.LlavaConfig(vision_config=hf.CLIPVisionConfig(**vision), text_config=hf.LlamaConfig(**TEXT),
                            image_token_index=tokenizer.convert_tokens_to_ids("<image>"))  # fmt: skip
    features = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = hf.LlavaProcessor(pictures, tokenizer, **features, chat_template=TURNS.replace("IMAGE", "<image>"))
    return save(folder, hf.LlavaForConditionalGeneration(config), processor)


def qwen(folder: Path) -> Path:
    import transformers as hf

    marks = {"vision_start": "<|vision_start|>", "image": "<|image_pad|>", "vision_end": "<|vision_end|>",
             "video": "<|video_pad|>"}  # fmt: skip
    tokenizer = tokenizer_of([*marks.values()])
    edges = {"shortest_edge": 16 * 14**2, "longest_edge": 60 * 14**2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {**VISION, "depth": 2, "num_heads": 4, "out_hidden_size": 32, "fullatt_block_indexes": [1]}
    ids = {f"{kind}_token_id": tokenizer.convert_tokens_to_ids(mark) for kind, mark in marks.items()}
    config = hf.Qwen2_5_VLConfig(vision_config=vision, text_config={**TEXT, "rope_parameters": rope}, **ids)
    template = TURNS.replace("IMAGE", "".join([*marks.values()][:3]))
    parts = hf.Qwen2VLImageProcessor(size=edges), tokenizer, hf.Qwen2VLVideoProcessor()
    processor = hf.Qwen2_5_VLProcessor(*parts, chat_template=template)
    return save(folder, hf.Qwen2_5_VLForConditionalGeneration(config), processor)


def conversations(folder: Path, count: int, seed: int) -> list[tuple[list[str], str, str]]:
    """Paths of images in a folder, question and answer of each: every eighth has images, in turn one and two."""
    folder.mkdir()
    draw, made = np.random.default_rng(seed), []
    for number in range(count):
        paths = [str(folder / f"{number}-{image}.png") for image in range(0 if number % 8 else 1 + number // 8 % 2)]
        for path in paths:
            colour = tuple(int(value) for value in draw.integers(0, 256, 3))
            Image.new("RGB", (int(draw.integers(40, 90)), int(draw.integers(40, 60))), colour).save(path)
        question, answer = ("What is in the picture? " * n for n in draw.integers(1, 6, 2))
        made.append((paths, question, answer))
    return made


def sharegpt(folder: Path, count: int = 40, seed: int = 0) -> Path:
    """A folder with LLaMA-Factory's data set `some`."""
    rows = [{"messages": [{"role": "user", "content": "<image>" * len(paths) + question},
                          {"role": "assistant", "content": answer}], "images": paths}
            for paths, question, answer in conversations(folder, count, seed)]  # fmt: skip
    (folder / "some.json").write_text(json.dumps(rows))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    about = {"file_name": "some.json", "formatting": "sharegpt", "columns": columns, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps({"some": about}))
    return folder


def openai(folder: Path, count: int = 40, seed: int = 0) -> Path:
    """A file of conversations as axolotl reads them, with paths of images among their parts."""
    made = conversations(folder, count, seed)
    turns = [[{"role": "user", "content": [*({"type": "image", "path": path} for path in paths),
                                           {"type": "text", "text": question}]},
              {"role": "assistant", "content": [{"type": "text", "text": answer}]}]
             for paths, question, answer in made]  # fmt: skip
    (folder / "some.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in turns))
    return folder / "some.jsonl"
