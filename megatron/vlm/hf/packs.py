"""Packs as inputs of transformers' models, for any PyTorch loop; the loss equals that of the separate samples.

Besides the text inputs (`megatron.vlm.data.batches`), by the `model_type` of the model's configuration:

internvl                    pixel_values [tiles, 3, S, S], left out where there are none; boundaries of samples
llava, deepseek_vl          pixel_values
llava_next                  pixel_values; image_sizes [images, 2], height and width
llava_onevision             the same; batch_num_images [samples with images]; boundaries of samples
gemma3                      pixel_values; attention_mask, of each kind of layer [1, 1, T, T], where there are images
qwen2_vl, qwen2_5_vl,       pixel_values [patches, numbers], pixel_values_videos; image_grid_thw, video_grid_thw
qwen3_vl, qwen3_vl_moe      [images, 3]; position_ids [4, 1, T]: in the sample, then in time, row and column (M-RoPE)

Boundaries of samples (`cu_seq_lens_q` and so on) go only to models that do not pass them on to their ViT, whose
attention would apply them to patches. Other models find the samples by `position_ids`.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.vlm.data.batches import IGNORED, boundaries, join_words
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.media.tiling import FRAMES, SQUARE, Grid, TiledImage, TilingRule
from megatron.vlm.families.media import TILINGS
from megatron.vlm.loss import REDUCTIONS
from megatron.vlm.microbatch import segment_ids
from megatron.vlm.models.vit.native import text_and_image_positions
from omnibal_ext.errors import UserError
from omnibal_ext.families.registry import MODELS

Batch = dict[str, Any]
Samples = Sequence[Mapping[str, Any]]


class JoinPack:
    """Joins the samples of a pack: the `collate_fn` of a DataLoader over a `ChatDataset` and a `PackBatchSampler`.

    Raises UserError if the model would compute something else on a pack than on its samples, or the dataset was made
    for another model.
    """

    def __init__(self, data: ChatDataset, config: Any, reduction: str | None = None) -> None:
        """Args:
        config: the model's (`model.config`).
        reduction: a name of `megatron.vlm.loss.REDUCTIONS`: the batch gets `weights` [1, T], each label's weight in
            the mean over the global batch. None: no `weights` (transformers' Trainer passes all keys to the model).
        """
        _check_layers(config)
        known = {kind: model.packs for kind, model in MODELS.items() if model.packs}
        if config.model_type not in known:
            raise UserError(f"packs for models of type {config.model_type!r} are not known; known: {', '.join(known)}")
        self.config, self.reduction, self.packs = config, reduction, known[config.model_type]
        self.takes = MODELS[config.model_type].takes
        _check_rotation(config, int(data.sizes.tokens.max()))
        _check_dataset(data, config, self.packs.tiling)

    def __call__(self, samples: Samples) -> Batch:
        """The batch of a pack; it must have samples."""
        batch = join_words(samples)
        pixels = [sample["pixel_values"] for sample in samples if len(sample["pixel_values"])]
        batch |= {"pixel_values": torch.cat(pixels)} if pixels and not TILINGS[self.packs.tiling].native else {}
        batch |= boundaries(samples) if self.packs.boundaries else {}
        for name in self.takes:
            batch |= EXTRA_INPUTS[name](samples, batch, self.config)
        if self.reduction is not None:
            parts = batch["labels"][0].split([len(sample["labels"]) for sample in samples])
            batch["weights"] = torch.cat([_weights(part, REDUCTIONS[self.reduction]) for part in parts])[None]
        return batch


def _sizes(samples: Samples, batch: Batch, config: Any) -> Batch:
    """Height and width of every image."""
    sizes = [(image.height, image.width) for sample in samples for image in sample["images"]]
    return {"image_sizes": torch.tensor(sizes)} if sizes else {}


def _counts(samples: Samples, batch: Batch, config: Any) -> Batch:
    """Images of each sample that has some: among several, an image is one tile."""
    counts = [len(sample["images"]) for sample in samples if sample["images"]]
    return {"batch_num_images": torch.tensor(counts)} if counts else {}


def _nothing(samples: Samples, batch: Batch, config: Any) -> Batch:
    return {}


def _gemma3_masks(samples: Samples, batch: Batch, config: Any) -> Batch:
    """Gemma 3's bool masks [1, 1, T, T] per kind of layer: causal within samples, bidirectional within an image.

    transformers' own masks would be wrong for packs: it takes positions within samples for positions in the sequence.
    """
    if "pixel_values" not in batch:
        return {}
    ids = batch["input_ids"][0]
    sample = segment_ids([len(one["input_ids"]) for one in samples])
    of_image = ids == config.image_token_id
    image = torch.where(of_image, (of_image.cumsum(0) - 1) // config.mm_tokens_per_image, -1)
    distance = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
    together = (image[:, None] == image) & of_image
    seen = (sample[:, None] == sample) & ((distance >= 0) | together)
    near = seen & (distance < config.text_config.sliding_window)
    return {"attention_mask": {"full_attention": seen[None, None], "sliding_attention": near[None, None]}}


def _patches_and_grids(samples: Samples, batch: Batch, config: Any) -> Batch:
    """Patches and grids of images and of videos, and `position_ids` [4, 1, T]: in the sample, then M-RoPE's three."""
    found: Batch = {}
    for name, pixels, film in (("image", "pixel_values", False), ("video", "pixel_values_videos", True)):
        parts = [part for sample in samples for part in _media_of(sample, film)]
        if parts:
            found[pixels] = torch.cat([patches for _, patches in parts])
            found[f"{name}_grid_thw"] = torch.tensor([(one.steps, one.rows, one.columns) for one, _ in parts])
    places = _token_positions(samples, batch["input_ids"][0], config)
    found["position_ids"] = torch.cat([batch["position_ids"][None], torch.from_numpy(places)[:, None]])
    return found


def _media_of(sample: Mapping[str, Any], film: bool) -> list[tuple[TiledImage, Tensor]]:
    """A sample's images, or its videos if `film`, each with its patches [patches, 3 x frames x size x size]."""
    pixels: Tensor = sample["pixel_values"]
    if pixels.dim() == 4:  # an image's frames are equal ones
        pixels = pixels.unsqueeze(2).expand(-1, -1, FRAMES, -1, -1)
    patches = pixels.flatten(1).split([image.tiles for image in sample["images"]])
    return [(one, part) for one, part in zip(sample["images"], patches, strict=True) if (one.film is not None) is film]


def _token_positions(samples: Samples, ids: Tensor, config: Any) -> np.ndarray:
    """M-RoPE positions (time, row, column) of every token in its sample: int64 [3, T]."""
    shown = [image for sample in samples for image in sample["images"]]
    grids = [grid for image in shown for grid in image.grids]
    pace = getattr(config.vision_config, "tokens_per_second", None)
    seconds = np.array([image.film.seconds if image.film else 1.0 for image in shown for _ in image.grids], np.float32)
    tokens = torch.isin(ids, torch.tensor([config.image_token_id, config.video_token_id])).nonzero()[:, 0].tolist()
    counts = [steps * rows * columns // SQUARE**2 for steps, rows, columns in grids]
    starts = [tokens[before] for before in np.cumsum([0, *counts])[:-1]]
    paces = (pace * seconds).tolist() if pace else ()
    return text_and_image_positions([len(one["input_ids"]) for one in samples], grids, starts, SQUARE, paces)


EXTRA_INPUTS: dict[str, Callable[[Samples, Batch, Any], Batch]] = {
    "image_sizes": _sizes,
    "batch_num_images": _counts,
    "token_type_ids": _gemma3_masks,
    "image_grid_thw": _patches_and_grids,
    "mm_token_type_ids": _nothing,  # models only compute positions from it, which packs have
}
"""How a pack gets the inputs in `Model.takes`, besides text and tiles."""


def _weights(labels: Tensor, power: float) -> Tensor:
    counts = (labels != IGNORED).float()
    return counts * counts.sum().clamp(min=1) ** -power


def _check_layers(config: Any) -> None:
    """Refuse layers that would look beyond a sample."""
    language, kind = config.get_text_config(), config.model_type
    other = set(getattr(language, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise UserError(
            f"packs for {kind}: its layers of {', '.join(sorted(other))} do not tell samples apart in transformers; "
            "tools/launch.py trains the families of docs/models.md"
        )
    if kind in MODELS and "token_type_ids" in MODELS[kind].takes and language._attn_implementation != "sdpa":
        raise UserError(
            f"packs for {kind}: images are seen in both directions under attn_implementation 'sdpa' alone, not "
            f"{language._attn_implementation!r}"
        )


def _check_rotation(config: Any, longest: int) -> None:
    """Refuse rotary scaling by a sequence's length if the longest sample, of so many tokens, is beyond its limit."""
    language = config.text_config
    rope = getattr(language, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("dynamic", "longrope"):
        return
    limit = rope.get("original_max_position_embeddings") if rope["rope_type"] == "longrope" else None
    limit = limit or language.max_position_embeddings
    if longest > limit:
        raise UserError(
            f"packs for {config.model_type}: its {rope['rope_type']} rotation turns all of a pack as its longest "
            f"sample asks, and one has {longest} tokens, more than {limit}; preprocess again with --max-tokens {limit}"
        )


def _check_dataset(data: ChatDataset, config: Any, tiling: str) -> None:
    """Refuse a dataset whose tiles or image tokens are not this model's."""
    manifest, vision = data.manifest, config.vision_config
    wanted, rule = TILINGS[tiling], manifest["tiling"]["rule"]
    size = vision.patch_size if wanted.native else vision.image_size
    rows = [
        ("tiling", rule, tiling if TILINGS[rule].read_as != wanted.read_as else rule),
        ("tile size", manifest["tile_size"], size if isinstance(size, int) else size[0]),
        ("image token", manifest["image_token_id"], config.image_token_id),
    ]
    if wanted.grids:  # the model derives grids from image sizes and its own list
        theirs = [tuple(side // vision.image_size for side in grid) for grid in config.image_grid_pinpoints]
        rows.append(("grids (rows, columns)", _grids(manifest["tiling"], wanted), theirs))
    if wanted.native and manifest.get("video_files"):
        rows.append(("video token", manifest["video_token_id"], config.video_token_id))
    drop = _flags_to_drop(manifest["tiling"], wanted)
    unlike = [f"{name} {made}, not {own}" for name, made, own in rows if made != own]
    if unlike:
        raise UserError(
            f"dataset {data.folder}: not made for this model of type {config.model_type!r}: {', '.join(unlike)}; "
            f"preprocess again with its folder as --model{drop}"
        )


def _flags_to_drop(made: Mapping[str, Any], rule: TilingRule) -> str:
    """Flags that limited the dataset's grids, to be dropped: the model chooses from all of its grids."""
    is_limited = rule.grids and (made["min_tiles"] > 1 or made["max_tiles"] < max(map(prod, rule.grids)))
    return ", and without --max-tiles and --min-tiles: it chooses from all of its grids" if is_limited else ""


def _grids(made: Mapping[str, Any], rule: TilingRule) -> list[Grid]:
    """(rows, columns) of the grids allowed in a dataset."""
    return [grid[::-1] for grid in rule.grids if made["min_tiles"] <= prod(grid) <= made["max_tiles"]]
