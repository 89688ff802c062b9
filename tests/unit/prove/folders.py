"""Small models of three kinds, and samples as their processors make them: with images of one shape, or sounds."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron.vlm.prove.models import ready
from tests.unit.hf import models
from tests.unit.hf.models import AUDIO_TOKEN, IMAGE_TOKEN

KINDS = {"llava": ("llava", 16), "qwen": ("qwen2.5-vl", 4), "gemma": ("gemma 3", 4)}
"""Of tests' families, and tokens of an image."""
HEARD = 10
"""Tokens of a sound of 40 mel frames."""
Features = dict[str, Any]


def model_of(kind: str) -> Any:
    return ready(models.build(KINDS[kind][0], seed=1))


def samples_of(kind: str, seed: int = 0) -> list[Features]:
    """Four samples, all but the second with an image: the first ends with its own, with which the last begins."""
    draw = torch.Generator().manual_seed(seed)
    tokens = KINDS[kind][1]
    return [
        with_image(kind, draw, tokens, 5, 0), with_words(kind, draw, 7), with_image(kind, draw, tokens, 3, 4),
        with_image(kind, draw, tokens, 0, 6),
    ]  # fmt: skip


def words(draw: torch.Generator, count: int) -> Tensor:
    return torch.randint(0, 120, (count,), generator=draw)


def with_words(kind: str, draw: torch.Generator, count: int) -> Features:
    return finished(kind, words(draw, count), {})


def with_image(kind: str, draw: torch.Generator, tokens: int, before: int, after: int) -> Features:
    ids = torch.cat([words(draw, before), torch.full((tokens,), IMAGE_TOKEN), words(draw, after)])
    if kind == "qwen":
        grid = torch.tensor([[1, 4, 4]])
        media = {"pixel_values": torch.randn(16, 96, generator=draw), "image_grid_thw": grid}
    else:
        media = {"pixel_values": torch.randn(1, 3, 16, 16, generator=draw)}
    return finished(kind, ids, media)


def finished(kind: str, ids: Tensor, media: Features) -> Features:
    """Labels at the words of its second half."""
    second = torch.arange(len(ids)) >= len(ids) // 2
    labels = ids.masked_fill(~second | (ids == IMAGE_TOKEN) | (ids == AUDIO_TOKEN), -100)
    types = {"qwen": "mm_token_type_ids", "gemma": "token_type_ids"}
    more = {types[kind]: (ids == IMAGE_TOKEN).long()} if kind in types else {}
    return {"input_ids": ids, "labels": labels, **more, **media}


@cache
def hearing(kind: str) -> tuple[Any, list[Features]]:
    """A model of a kind that hears, and three samples with a sound each."""
    import transformers

    draw = torch.Generator().manual_seed(7)
    if kind == "qwen":
        from tests.unit.integrations.test_isolation import processed, samples_of

        model, samples = samples_of("qwen2.5-omni", "sdpa")
        return ready(model), processed(samples, model.config)
    if kind == "llava":
        tower = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
        config: Any = transformers.Qwen2AudioConfig(
            audio_config=transformers.Qwen2AudioEncoderConfig(**tower, num_mel_bins=8, max_source_positions=20),
            text_config={**models.PARTS["LLAMA"], "model_type": "qwen2"}, audio_token_id=AUDIO_TOKEN,
        )  # fmt: skip
        model = transformers.Qwen2AudioForConditionalGeneration(config)
        media = [{"input_features": torch.randn(1, 8, 40, generator=draw),
                  "feature_attention_mask": torch.ones(1, 40).long()} for _ in range(3)]  # fmt: skip
    else:
        make_config, make_model = models.classes("gemma 4")
        tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}
        audio = transformers.Gemma4AudioConfig(**tower, subsampling_conv_channels=[128, 2], use_clipped_linears=False)
        fields = models.config_fields("gemma 4") | {"audio_config": audio, "audio_token_id": AUDIO_TOKEN}
        model = make_model(make_config(**fields))
        media = [{"input_features": torch.randn(1, 40, 128, generator=draw),
                  "input_features_mask": torch.ones(1, 40).bool()} for _ in range(3)]  # fmt: skip
    heard = torch.full((HEARD,), AUDIO_TOKEN)
    made = []
    for number, given in enumerate(media):
        ids = torch.cat([words(draw, 3 + number), heard, words(draw, 4)])
        made.append({"input_ids": ids, "labels": ids.masked_fill(ids == AUDIO_TOKEN, -100), **given})
    return ready(models.randomised(model, 1)), made
