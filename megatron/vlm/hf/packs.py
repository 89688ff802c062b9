"""Packs as inputs of transformers' models, for any PyTorch loop; the loss equals that of the separate samples.

Besides the text inputs (`megatron.vlm.data.batches`), by the `model_type` of the model's configuration:

internvl                    pixel_values [tiles, 3, S, S], left out where there are none; boundaries of samples
llava, vipllava,            pixel_values
deepseek_vl
video_llava                 pixel_values; pixel_values_videos [videos, frames, 3, S, S]
llava_next,                 pixel_values; image_sizes [images, 2], height and width
llava_next_video
llava_onevision             the same; batch_num_images [samples with images]; boundaries of samples
idefics3, smolvlm           pixel_values [1, tiles, 3, S, S]
mistral3, lighton_ocr       pixel_values [images, 3, H, W], padded; image_sizes
gemma3                      pixel_values; attention_mask, of each kind of layer [1, 1, T, T], where there are images
gemma4, gemma4_unified      pixel_values [images, patches, numbers], padded; image_position_ids; attention_mask
qwen2_vl, qwen2_5_vl,       pixel_values [patches, numbers], pixel_values_videos; image_grid_thw, video_grid_thw
qwen3_vl, qwen3_vl_moe      [images, 3]; position_ids [4, 1, T]: in the sample, then in time, row and column (M-RoPE)
qwen3_5, qwen3_5_moe        the same; boundaries of samples; seq_idx [1, T], the number of each token's sample
glm4v, glm46v, glm4v_moe,   pixel_values, image_grid_thw and position_ids; each step of a video is an image
glm_ocr
paddleocr_vl                pixel_values [patches, 3, size, size]; image_grid_thw; position_ids
thinkers of Qwen-Omni       the same of images and videos, which may be heard; input_features [sounds, bins, frames],
                            padded; feature_attention_mask

Boundaries of samples (`cu_seq_lens_q` and so on) go to models whose ViT does not apply them to patches. Other models
find the samples by `position_ids`.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron.vlm.data.batches import IGNORED, boundaries, join_words
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.hf.pack_inputs import INPUTS, Batch, Pack, Samples
from megatron.vlm.loss import REDUCTIONS
from megatron.vlm.microbatch import segment_ids
from omnibal_ext.errors import UserError
from omnibal_ext.families.family import Packs
from omnibal_ext.families.media import TILINGS
from omnibal_ext.families.registry import MODELS
from omnibal_ext.integrations.torch_loops import collate
from omnibal_ext.joining.checks import check_model, check_rotation
from omnibal_ext.modalities.vision.tiling import Grid, TilingRule


class JoinPack:
    """A join of a pack's samples: the `collate_fn` of a DataLoader over a `ChatDataset` and a `PackBatchSampler`, or
    over samples that transformers' processor made.

    Raises UserError if the model would compute something else on a pack than on its samples, or the dataset was made
    for another model.
    """

    def __init__(self, data: ChatDataset | None, config: Any, reduction: str | None = None) -> None:
        """Check model and dataset, and make the function.

        Args:
            data: None: samples are a processor's, joined by `omnibal_ext.integrations.torch_loops.collate`.
            config: the model's (`model.config`).
            reduction: a name of `megatron.vlm.loss.REDUCTIONS`: the batch gets `weights` [1, T], each label's weight in
                the mean over the global batch. None: no `weights` (transformers' Trainer passes all keys to the model).
        """
        self.config, self.reduction, self.packs = config, reduction, check_model(config)
        self.takes, self.normalization = MODELS[config.model_type].takes, None if data is None else data.normalization
        if data is not None:
            check_rotation(config, int(data.sizes.tokens.max()))
            _check_dataset(data, config, self.packs)

    def __call__(self, samples: Samples) -> Batch:
        """Return the batch of a pack; it must have samples."""
        batch = collate(samples, self.config) if self.normalization is None else self._of_dataset(samples)
        if self.reduction is not None:
            parts = batch["labels"][0].split([torch.as_tensor(sample["input_ids"]).numel() for sample in samples])
            batch["weights"] = torch.cat([_weights(part, REDUCTIONS[self.reduction]) for part in parts])[None]
        return batch

    def _of_dataset(self, samples: Samples) -> Batch:
        assert self.normalization is not None
        batch = join_words(samples)
        pack = Pack(samples, batch, self.config, self.packs, self.normalization)
        more = {} if pack.rule.native or not pack.images else {"pixel_values": pack.pixels}
        more |= boundaries(samples) if self.packs.boundaries else {}
        more |= {"seq_idx": segment_ids(pack.lengths)[None].int()} if self.packs.linear_attention else {}
        for name in self.takes:
            more |= INPUTS[name](pack)
        return batch | more


def _weights(labels: Tensor, power: float) -> Tensor:
    counts = (labels != IGNORED).float()
    return counts * counts.sum().clamp(min=1) ** -power


def _check_dataset(data: ChatDataset, config: Any, packs: Packs) -> None:
    """Raise UserError if a dataset's tiles or image tokens are not this model's."""
    manifest, vision = data.manifest, config.vision_config
    wanted, rule = TILINGS[packs.tiling], manifest["tiling"]["rule"]
    size = vision.patch_size if wanted.native else vision.image_size
    if square := getattr(vision, "pooling_kernel_size", None):  # a patch may be an entire square
        size = size * square // wanted.square
    rows = [
        ("tiling", rule, packs.tiling if TILINGS[rule].read_as != wanted.read_as else rule),
        ("tile size", manifest["tile_size"], size if isinstance(size, int) else size[0]),
        ("image token", manifest["image_token_id"], config.image_token_id),
    ]
    if wanted.grids:  # the model derives grids from image sizes and its own list
        theirs = [tuple(side // vision.image_size for side in grid) for grid in config.image_grid_pinpoints]
        rows.append(("grids (rows, columns)", _grids(manifest["tiling"], wanted), theirs))
    if wanted.native and manifest.get("video_files"):
        token = config.image_token_id if packs.videos_as_images else config.video_token_id
        rows.append(("video token", manifest["video_token_id"], token))
    drop = _flags_to_drop(manifest["tiling"], wanted)
    unlike = [f"{name} {made}, not {own}" for name, made, own in rows if made != own]
    if unlike:
        raise UserError(
            f"dataset {data.folder}: not made for this model of type {config.model_type!r}: {', '.join(unlike)}; "
            f"preprocess again with its folder as --model{drop}"
        )


def _flags_to_drop(made: Mapping[str, Any], rule: TilingRule) -> str:
    """Return an error's advice to drop --max-tiles and --min-tiles, if these ruled out grids that the model may choose,
    else ""."""
    is_limited = rule.grids and (made["min_tiles"] > 1 or made["max_tiles"] < max(map(prod, rule.grids)))
    return ", and without --max-tiles and --min-tiles: it chooses from all of its grids" if is_limited else ""


def _grids(made: Mapping[str, Any], rule: TilingRule) -> list[Grid]:
    """Return (rows, columns) of the grids allowed in a dataset."""
    return [grid[::-1] for grid in rule.grids if made["min_tiles"] <= prod(grid) <= made["max_tiles"]]
