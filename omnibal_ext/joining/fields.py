"""The fields of a pack's samples, checked and joined: dicts of tensors, of arrays or lists, as processors make them."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omnibal_ext.errors import UserError
from omnibal_ext.families.registry import MODELS
from omnibal_ext.reading.checks import shown

if TYPE_CHECKING:
    from torch import Tensor

OF_TOKENS = ("labels", "mm_token_type_ids", "token_type_ids")
"""Fields with a value a token, which all samples of a pack have, or none."""
OF_MEDIA = ("pixel_", "image_", "video_", "second_per_grid", "input_features", "feature_", "audio_", "batch_num_images")
"""How fields of images, videos and sounds begin."""
FILLERS = {"image_position_ids": -1}
"""What fills up media to the largest; others 0, as processors do."""


def rows_of(samples: Sequence[Mapping[str, Any]]) -> list[dict[str, "Tensor"]]:
    """Return each sample's fields as tensors, checked. Raises UserError for what cannot be in a pack.

    Left out are fields that are None, Energon's own (`__key__`), a mask of ones, and positions that count from 0.
    """
    if not samples:
        raise UserError("a pack without samples")
    rows = [_row(f"sample {number} of the pack", sample) for number, sample in enumerate(samples)]
    for key in (*OF_TOKENS, "position_ids"):
        lacking = [number for number, row in enumerate(rows) if key not in row]
        if lacking and len(lacking) < len(rows):
            raise UserError(f"sample {lacking[0]} of the pack has no {key}, and others have: give all of them {key}")
    return rows


def joined_field(key: str, rows: Sequence[Mapping[str, "Tensor"]], lengths: Sequence[int]) -> "Tensor":
    """Concatenate a field of all samples that have it: along tokens, or media after media, filled up to the largest."""
    import torch

    values = [row[key] for row in rows if key in row]
    if not is_of_media(key) and all(
        key in row and row[key].shape[-1] == length for row, length in zip(rows, lengths, strict=True)
    ):
        alike = len({value.dim() for value in values}) == 1
        return torch.cat(values if alike else [value.reshape(-1) for value in values], dim=-1)
    if len({value.dim() for value in values}) > 1:
        raise UserError(f"{key} of a pack's samples: of {', '.join(str(tuple(value.shape)) for value in values)}")
    largest = [max(sides) for sides in zip(*(value.shape[1:] for value in values), strict=True)]
    return torch.cat([_filled(value, largest, FILLERS.get(key, 0)) for value in values])


def films_as_images(rows: Sequence[dict[str, "Tensor"]], config: Any) -> None:
    """Replace videos by their steps as images, in place, for models with one token for both (GLM-V).

    Raises UserError for a sample with both: transformers takes one kind a batch.
    """
    packs = MODELS[config.model_type].packs if config.model_type in MODELS else None
    for number, row in enumerate(rows if packs is not None and packs.videos_as_images else ()):
        if (films := row.pop("video_grid_thw", None)) is None:
            continue
        if "image_grid_thw" in row:
            raise UserError(f"sample {number} of the pack: images and videos, of which {config.model_type} takes one")
        steps = films.repeat_interleave(films[:, 0], dim=0)
        steps[:, 0] = 1
        row["image_grid_thw"], row["pixel_values"] = steps, row.pop("pixel_values_videos")


def is_of_media(key: str) -> bool:
    """Say whether a field has values of images, videos or sounds, not of tokens."""
    return key.startswith(OF_MEDIA)


def _row(where: str, sample: Mapping[str, Any]) -> dict[str, "Tensor"]:
    row = {
        key: _tensor(f"{where}: {key}", value)
        for key, value in sample.items()
        if value is not None and not key.startswith("__")
    }
    if "input_ids" not in row:
        raise UserError(f"{where}: has no input_ids, but {', '.join(row)}")
    count = row["input_ids"].shape[-1]
    if not count or row["input_ids"].numel() != count:
        shape = tuple(row["input_ids"].shape)
        raise UserError(f"{where}: input_ids {shape}: must be those of one sample, [T] or [1, T]")
    for key in OF_TOKENS:
        if key in row and row[key].numel() != count:
            raise UserError(f"{where}: {key} {tuple(row[key].shape)} of {count} tokens: must have a value for each")
    _drop_mask(where, row, count)
    _drop_positions(where, row, count)
    return row


def _tensor(where: str, value: Any) -> "Tensor":
    import torch

    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{where} is {shown(value)}, no numbers: leave it out of the samples to be joined") from None
    return found if found.dim() else found[None]


def _drop_mask(where: str, row: dict[str, "Tensor"], count: int) -> None:
    """Drop a mask of ones, in place: in a pack that has a mask, transformers does not look for samples. Raises
    UserError for other masks."""
    mask = row.pop("attention_mask", None)
    if mask is not None and (mask.numel() != count or not bool((mask == 1).all())):
        raise UserError(
            f"{where}: attention_mask {tuple(mask.shape)} of {count} tokens hides some: samples of a pack see all of "
            "their own; leave out padding (padding=False), and masks of your own"
        )


def _drop_positions(where: str, row: dict[str, "Tensor"], count: int) -> None:
    """Drop positions that count from 0, in place: they are made for the pack; those of three axes stay. Raises
    UserError for others."""
    import torch

    ids = row.get("position_ids")
    if ids is None:
        return
    axes, rest = divmod(ids.numel(), count)
    from_zero = torch.equal(ids.reshape(-1)[:count].cpu().long(), torch.arange(count))
    if rest or axes not in (1, 3, 4) or not (axes == 3 or from_zero):
        raise UserError(
            f"{where}: position_ids {tuple(ids.shape)} of {count} tokens: must count from 0, or be of time, row and "
            "column; leave them out"
        )
    if axes == 1:
        del row["position_ids"]


def _filled(value: "Tensor", sides: Sequence[int], filler: int) -> "Tensor":
    from torch.nn.functional import pad

    missing = [side - own for side, own in zip(sides, value.shape[1:], strict=True)]
    return pad(value, [n for one in reversed(missing) for n in (0, one)], value=filler) if any(missing) else value
