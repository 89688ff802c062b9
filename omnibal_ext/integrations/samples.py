"""What the integrations share: sizes of samples, packs of a buffer, and one sequence of a pack."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeVar

from omnibal_ext.errors import UserError
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.in_memory import pack

T = TypeVar("T")
IGNORED = -100
NO_COSTS: PackCosts | None = None
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
        """Return the samples of each pack. Raises UserError as `pack` does."""
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


def join(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join samples, dicts of tensors, to one sequence.

    Fields of T values are joined along it, all others (pixels, grids) along their first dimension. `labels`, where
    there are any, are -100 at the first token of each sample, so that none is predicted from the one before.

    Returns:
        The fields, and position_ids [T] from 0 in each sample unless there are some, cu_seqlens int32 [samples + 1] and
        max_seqlen.
    """
    import torch

    rows = [{key: torch.as_tensor(value) for key, value in each.items() if key[:2] != "__"} for each in samples]
    lengths = [row["input_ids"].shape[-1] for row in rows]
    for row, length in zip(rows, lengths, strict=True):
        if "labels" in row:
            row["labels"] = row["labels"].clone()
            row["labels"][..., 0] = IGNORED
        row.setdefault("position_ids", torch.arange(length))
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        values = [row[key] for row in rows if key in row]
        of_tokens = all(key in row and row[key].shape[-1:] == (n,) for row, n in zip(rows, lengths, strict=True))
        joined[key] = torch.cat(values, dim=-1 if of_tokens else 0)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return {**joined, "cu_seqlens": ends, "max_seqlen": max(lengths)}
