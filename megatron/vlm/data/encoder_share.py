"""A rank's share of a pack that several ranks encode: inputs of its pieces, and sizes of all pieces."""

from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import Any

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.look_ahead import Planned, PlannedDataset
from megatron.vlm.media import Media
from megatron.vlm.microbatch import Microbatch
from omnibal_ext.flow import in_rows
from omnibal_ext.image_assignment import EncoderRank, piece_costs
from omnibal_ext.modalities.modality import Size
from omnibal_ext.packing.index.packed_index import PackedIndex


def numbered(packs: Iterable[int], microbatches: int) -> Iterator[tuple[int, int]]:
    """Pair each of a sequence of pack numbers with its microbatch in its iteration."""
    return zip(packs, cycle(range(microbatches)), strict=False)


class EncoderShares(PlannedDataset):
    """Dataset: (pack number, microbatch) -> Microbatch with what this rank encodes, on the host (`Media.encodes`)."""

    def __init__(self, data: ChatDataset, index: PackedIndex, worker: EncoderRank) -> None:
        self.data, self.index, self.worker = data, index, worker
        self.readers = {size: data.readers[size] for size in in_rows([*worker.rates]) if size in data.readers}

    def planned(self, number: tuple[int, int]) -> Planned:
        """Return a pack without what is decoded."""
        pack, microbatch = number
        samples = [*map(self.data.sample, self.index.samples(pack))] if pack >= 0 else []
        pieces = {size: reader.pieces(samples) for size, reader in self.readers.items()}
        takes = iter(self.worker.takes(piece_costs(pieces, self.worker.rates), microbatch))
        media, inputs = dict[Size, Media](), dict[Size, list[Any]]()
        for size, reader in self.readers.items():
            media[size], some = reader.share(samples, pieces[size], [next(takes) for _ in pieces[size]])
            inputs |= {size: some} if some else {}
        batch = Microbatch(
            lengths=(),
            samples=len(samples),
            useful_tokens=0,
            pack=pack,
            sample_ids=tuple(sample.number for sample in samples),
            media=media,
        )
        return Planned(batch, inputs)
