"""What the integrations share: sizes of samples, packs of a buffer, and one sequence of a pack."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeVar

from omnibal_ext.errors import UserError
from omnibal_ext.joining.fields import films_as_images, joined_field, rows_of
from omnibal_ext.joining.pack_positions import has_positions, pack_positions, positions_by_kind
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.in_memory import pack

T = TypeVar("T")
IGNORED = -100
REMEDY = "give its configuration, partial(collate, config=model.config)"
NO_COSTS: PackCosts | None = None
NO_CONFIG: Any = None
PIXELS = ("pixel_values", "pixel_values_videos")


def size_of(sample: Any) -> tuple[int, int]:
    """Return (tiles, tokens) of a sample with `input_ids` [T] or [1, T] and, with images, `pixel_values`.

    Pixels [tiles, 3, H, W] or [images, tiles, 3, H, W] are tiles, [patches, D] (Qwen's) patches; videos as well. The
    sample is a dict, Megatron-Bridge's (`prepared_sequence`, or `visual_tensors`) or NeMo-RL's (`message_log`).
    """
    if isinstance(sample, Mapping):
        return tiles_of(sample), _length(sample["input_ids"])
    if hasattr(sample, "message_log"):
        return sum(map(tiles_of, sample.message_log)), sample.packing_cost
    if getattr(sample, "prepared_sequence", None) is not None:
        return tiles_of(sample.prepared_sequence.visual_values), sample.prepared_sequence.sequence_length
    if not hasattr(sample, "input_ids"):
        raise UserError(f"{type(sample).__name__}: a sample without input_ids: say its size, in sample_size")
    return tiles_of(getattr(sample, "visual_tensors", None) or vars(sample)), _length(sample.input_ids)


def _length(ids: Any) -> int:
    return int(ids.shape[-1]) if hasattr(ids, "shape") else len(ids)


def tiles_of(sample: Mapping[str, Any]) -> int:
    """Return the tiles, or patches, of a sample's pixels: 0 without any. NeMo-RL's are lists, one for each message."""
    given = (sample[key] for key in PIXELS if sample.get(key) is not None)
    each = (one for pixels in given for one in getattr(pixels, "tensors", [pixels]) if one is not None)
    shapes = [tuple(one.shape) for one in each]
    return sum(prod(shape[:-3]) if len(shape) > 3 else shape[0] for shape in shapes)


class Packer(NamedTuple):
    """How a buffer is packed: the arguments of `pack`."""

    vit_budget: int
    llm_budget: int
    costs: PackCosts | None = None
    beyond: str = "drop"
    seconds: float | None = None

    def groups(self, samples: Sequence[T], size_of: Callable[[T], tuple[int, int]]) -> list[list[T]]:
        """Return the samples of each pack; `size_of`: (tiles, tokens) of one. Raises UserError as `pack` does."""
        sizes = [size_of(sample) for sample in samples]
        packs = pack([tiles for tiles, _ in sizes], [tokens for _, tokens in sizes], **self._asdict())
        return [[samples[number] for number in group] for group in packs]

    def groups_and_rest(
        self, samples: Sequence[T], size_of: Callable[[T], tuple[int, int]]
    ) -> tuple[list[list[T]], list[T]]:
        """Return full packs, and the samples of the emptiest one, which a stream packs with those that come next."""
        groups = self.groups(samples, size_of)
        fill = [sum(size_of(sample)[1] for sample in group) for group in groups]
        rest = groups.pop(fill.index(min(fill))) if groups else []
        return groups, rest


def epoch_effort(samples: int, seconds: float | None) -> float:
    """Return the effort, in nominal seconds, of packing a whole epoch: `seconds`; if None more than `pack`'s own."""
    return max(0.1, 1e-4 * samples) if seconds is None else seconds


def join(samples: Sequence[Mapping[str, Any]], config: Any = None) -> dict[str, Any]:
    """Join samples, dicts of tensors, arrays or lists, to one sequence.

    Fields of T values are joined along it, all others (pixels, grids) along their first dimension, filled up to the
    largest. `labels`, where there are any, are -100 at the first token of each sample, so that none is predicted from
    the one before. An `attention_mask` of ones is left out, and what is None.

    Args:
        config: of transformers' model (`model.config`), for positions of its own (M-RoPE); without it those of images
            are known from `mm_token_type_ids`.

    Returns:
        The fields, and position_ids unless there are some, [T] from 0 in each sample, or [3, T] (time, row, column);
        cu_seqlens int32 [samples + 1] and max_seqlen.

    Raises:
        UserError: another mask, text among the fields, fields that not all samples have, positions not known.
    """
    import torch

    rows = rows_of(samples)
    if config is not None:
        films_as_images(rows, config)
    lengths = [row["input_ids"].shape[-1] for row in rows]
    for row in rows:
        if "labels" in row:
            row["labels"] = row["labels"].clone()
            row["labels"][..., 0] = IGNORED
    keys = dict.fromkeys(key for row in rows for key in row)
    joined: dict[str, Any] = {key: joined_field(key, rows, lengths) for key in keys}
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    if "position_ids" not in joined:
        joined["position_ids"] = _positions(joined, ends, config)
    return {**joined, "cu_seqlens": ends, "max_seqlen": max(lengths)}


def _positions(joined: Mapping[str, Any], ends: Any, config: Any) -> Any:
    """Return the positions of a joined pack, [T] or [3, T]. Raises UserError where the model's are not known."""
    import torch

    images, films, kinds = (joined.get(key) for key in ("image_grid_thw", "video_grid_thw", "mm_token_type_ids"))
    if config is not None and has_positions(config):
        seconds = joined.get("second_per_grid_ts", joined.get("video_second_per_grid"))
        return pack_positions(config, joined["input_ids"].reshape(-1), ends, images, films, seconds)
    if config is None and (kinds is not None or images is not None or films is not None):
        try:
            return positions_by_kind([] if kinds is None else kinds.reshape(-1), ends, images, films)
        except UserError as error:
            raise UserError(f"{error}; positions or masks are the model's own: {REMEDY}") from None
    return torch.cat([torch.arange(length) for length in ends.diff().tolist()])
