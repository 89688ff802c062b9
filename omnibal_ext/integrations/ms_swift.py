"""ms-swift: `--packing true` with two budgets, for data sets and streams.

# omnibal_packing.py, and on the command line: --packing true --external_plugins omnibal_packing.py
from omnibal_ext.integrations.ms_swift import install
install(vit_budget=16384)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omnibal_ext.integrations.samples import Packer, tiles_of
from omnibal_ext.output import say
from omnibal_ext.packing import pack
from omnibal_ext.packing.costs import PackCosts

BATCH = 1000
"""Samples packed together, as ms-swift does."""


@dataclass(frozen=True)
class TwoBudgets:
    """What ms-swift calls to pack; can be pickled, since its workers may be spawned."""

    vit_budget: int
    costs: PackCosts | None = None
    beyond: str = "drop"

    def calculate_matched_group(
        self, sequences: Sequence[tuple[Any, ...]], packing_length: int, is_finished: bool = True, strategy: str = ""
    ) -> tuple[list[list[tuple[Any, ...]]], list[tuple[Any, ...]]]:
        """Return the items of each pack, and those that wait for the next call: of a stream, the emptiest pack's.

        Args:
            sequences: items (number, tokens, tiles), or (encoded sample, tokens) of a stream.
            packing_length: most tokens of a pack: `--packing_length`, or else `--max_length`.
        """
        if strategy == "sequential":
            say("warning: --packing_strategy sequential: packs of two budgets do not keep the order", error=True)
        packer = Packer(self.vit_budget, packing_length, self.costs, self.beyond)
        return (packer.groups(sequences, _size), []) if is_finished else packer.groups_and_rest(sequences, _size)

    def create_packed_idx(
        self, rank: int, offset: int, lengths: Sequence[Any], out_queue: Any, packing_length: int, strategy: str
    ) -> None:
        """Pack a worker's part of a data set, and send packs of (number, tokens) as they are made."""
        try:
            each = [length if isinstance(length, list) else [length] for length in lengths]
            if uncounted := sum(min(one) >= 0 for one in each):
                say(
                    f"warning: {uncounted} of {len(each)} samples have no tiles counted, as in a cached data set that "
                    "was exported without this plugin: their packs keep to tokens alone; export it again with it",
                    error=True,
                )
            items = [(number, *_tokens_and_tiles(length)) for number, length in enumerate(each, offset)]
            waiting: list[tuple[Any, ...]] = []
            for first in range(0, len(items), BATCH):
                new = items[first : first + BATCH]
                finished = first + BATCH >= len(items)
                packs, waiting = self.calculate_matched_group([*waiting, *new], packing_length, finished, strategy)
                out_queue.put((rank, [[item[:2] for item in pack] for pack in packs], len(new)))
        finally:  # the trainer waits for it without end
            out_queue.put((rank, [], -1))


def install(vit_budget: int, costs: PackCosts | None = None, beyond: str = "drop") -> None:
    """Have `--packing true` pack with two budgets.

    Tiles are counted when ms-swift counts tokens, before training. A `--cached_dataset` must be exported with this
    plugin too: without, its samples count as texts, and a warning says how many.

    Args:
        vit_budget: most tiles of a pack, of patches for models at native resolution (Qwen-VL: 4 a visual token).
        costs, beyond: as in `omnibal_ext.packing.pack`.
    """
    from swift.dataset import packing
    from swift.pipelines.train import sft

    class LengthsAndTiles(sft.AddLengthPreprocessor):
        def preprocess(self, row: dict[str, Any]) -> dict[str, Any]:
            encoded = self.template.encode(row, return_length=True)
            return {**row, "lengths": [*encoded["lengths"], -1 - tiles_of(encoded)]}

    say(
        f"omnibal: packs of at most {vit_budget:,} tiles (of Qwen-VL: patches), and of --packing_length tokens; on a "
        "new machine the packer compiles first, for 15 s or more"
    )
    pack([1], [1], vit_budget=1, llm_budget=1)  # before workers are forked
    budgets = TwoBudgets(vit_budget, costs, beyond)
    packing.calculate_matched_group = budgets.calculate_matched_group
    packing.PackingDataset.create_packed_idx = staticmethod(budgets.create_packed_idx)
    sft.AddLengthPreprocessor = LengthsAndTiles


def _size(item: tuple[Any, ...]) -> tuple[int, int]:
    """Return (tiles, tokens) of an item."""
    return (item[2] if len(item) > 2 else tiles_of(item[0])), item[1]


def _tokens_and_tiles(lengths: Sequence[int]) -> tuple[int, int]:
    """A negative length is a number of tiles, less 1 and negated."""
    return sum(value for value in lengths if value >= 0), sum(-1 - value for value in lengths if value < 0)
