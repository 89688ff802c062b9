"""Faults of packs, planted in right ones: each changes the features before they are joined, or the batch."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from omnibal_ext.integrations.torch_loops import collate
from tests.unit.hf.models import IMAGE_TOKEN
from tests.unit.prove.folders import Features

WINDOW = 3


def spans(features: Sequence[Features]) -> list[slice]:
    ends = torch.tensor([0, *(len(one["input_ids"]) for one in features)]).cumsum(0).tolist()
    return [slice(begin, end) for begin, end in pairwise(ends)]


def alone_mask(features: Sequence[Features]) -> Tensor:
    """Bool [T, T]: causal within samples."""
    sample = torch.arange(len(features)).repeat_interleave(torch.tensor([len(one["input_ids"]) for one in features]))
    return (sample[:, None] == sample) & torch.ones(len(sample), len(sample)).tril().bool()


def masked(batch: Features, change: Callable[[Tensor], Tensor], own: Tensor) -> Features:
    """The batch with masks of tokens by tokens, of each kind of layer where it has some already, changed."""
    mask = batch.get("attention_mask")
    if isinstance(mask, dict):
        return batch | {"attention_mask": {name: change(one[0, 0])[None, None] for name, one in mask.items()}}
    return batch | {"attention_mask": change(own)[None, None]}


def joined(features: list[Features], config: Any) -> Features:
    batch = collate(features, config)
    return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


def text_positions(features: list[Features], config: Any) -> Features:
    """Of words alone: an image's tokens count as such (M-RoPE's), or not at all."""
    batch = collate(features, config)
    if batch["position_ids"].dim() == 3:
        return batch | {"position_ids": batch["position_ids"][:1].expand(4, -1, -1)}
    is_word = batch["input_ids"][0] != IMAGE_TOKEN
    places = [is_word[span].long().cumsum(0) for span in spans(features)]
    return masked(batch, lambda mask: mask, alone_mask(features)) | {"position_ids": torch.cat(places)[None]}


def positions_of_another(features: list[Features], config: Any) -> Features:
    batch = collate(features, config)
    places = batch["position_ids"]
    turned = torch.cat([places[..., span] for span in reversed(spans(features))], dim=-1)
    return masked(batch, lambda mask: mask, alone_mask(features)) | {"position_ids": turned}


def label_across(features: list[Features], config: Any) -> Features:
    batch = collate(features, config)
    first = spans(features)[1].start
    batch["labels"][0, first] = batch["input_ids"][0, first]
    return batch


def doubled(features: list[Features], config: Any) -> Features:
    return collate([features[0], features[1], features[1], *features[2:]], config)


def lost_image(features: list[Features], config: Any) -> Features:
    batch = collate(features, config)
    rows = len(features[0]["pixel_values"])
    if "image_grid_thw" in batch:
        batch["image_grid_thw"] = batch["image_grid_thw"][1:]
    return batch | {"pixel_values": batch["pixel_values"][rows:]}


def swapped_images(features: list[Features], config: Any) -> Features:
    batch = collate(features, config)
    rows = len(features[0]["pixel_values"])
    first, second, *rest = batch["pixel_values"].split(rows)
    return batch | {"pixel_values": torch.cat([second, first, *rest])}


def wrong_normaliser(features: list[Features], config: Any) -> Features:
    batch = collate(features, config)
    return batch | {"num_items_in_batch": torch.tensor(batch["input_ids"].numel())}


def dropped_token(features: list[Features], config: Any) -> Features:
    cut = {name: value[:-1] if value.dim() == 1 else value for name, value in features[2].items()}
    return collate([*features[:2], cut, *features[3:]], config)


def joined_image_tokens(features: list[Features], config: Any) -> Features:
    """Images of two samples as one: of one grid, or all of their tokens see each other."""
    batch = collate([features[0], features[3], *features[1:3]], config)
    if "image_grid_thw" in batch:
        return batch | {"image_grid_thw": torch.cat([torch.tensor([[1, 8, 4]]), batch["image_grid_thw"][2:]])}
    of_image = batch["input_ids"][0] == IMAGE_TOKEN
    own = alone_mask([features[0], features[3], *features[1:3]])
    return masked(batch, lambda mask: mask | (of_image[:, None] & of_image), own)


def window_across(features: list[Features], config: Any) -> Features:
    batch = collate(features, config)
    place = torch.arange(batch["input_ids"].numel())
    behind = place[:, None] - place
    return masked(batch, lambda mask: mask | (behind >= 0) & (behind < WINDOW), alone_mask(features))


def sounds_out_of_order(features: list[Features], config: Any) -> Features:
    """Of a model that hears."""
    batch = hearing_collate(features, config)
    return batch | {name: batch[name].flip(0) for name in batch if name.startswith(("input_features", "feature_"))}


def hearing_collate(features: list[Features], config: Any) -> Features:
    return collate(features, None if config.model_type == "qwen2_audio" else config)


FAULTS: dict[str, tuple[Callable[[list[Features], Any], Features], str]] = {
    "mask joined": (joined, "isolation"),
    "text positions": (text_positions, "positions"),
    "positions of another sample": (positions_of_another, "positions"),
    "a label across a border": (label_across, "labels"),
    "a doubled sample": (doubled, "tokens"),
    "a lost image": (lost_image, "media"),
    "images swapped": (swapped_images, "media"),
    "wrong normaliser": (wrong_normaliser, "normaliser"),
    "dropped last token": (dropped_token, "tokens"),
    "image tokens of two samples joined": (joined_image_tokens, "isolation"),
    "a window that reaches across": (window_across, "isolation"),
}
"""And the check that names each. Order of sounds: of models that hear."""
