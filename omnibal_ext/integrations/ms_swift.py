"""ms-swift: `--packing true` with two budgets, for data sets and streams.

# omnibal_packing.py, and on the command line: --packing true --external_plugins omnibal_packing.py
from omnibal_ext.integrations.ms_swift import install
install(vit_budget=16384)
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import signature, unwrap
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.integrations.samples import Packer, tiles_of
from omnibal_ext.output import say
from omnibal_ext.packing import warm_up
from omnibal_ext.packing.costs import PackCosts

BATCH = 1000
"""Samples packed together, as ms-swift does."""
TILES = "omnibal_tiles"
"""The column of a data set that has them; ms-swift itself passes it over."""
SIGNATURES = {
    "calculate_matched_group": ["sequences", "packing_length", "is_finished", "strategy"],
    "create_packed_idx": ["rank", "offset", "lengths", "out_queue", "packing_length", "packing_strategy"],
    "_worker_jobs": ["self", "jobs"],
}
"""Parameters of the functions that are replaced, as ms-swift 4.5.3 and 4.6 have them."""


@dataclass(frozen=True)
class TwoBudgets:
    """What ms-swift calls to pack; can be pickled, since its workers may be spawned."""

    vit_budget: int
    costs: PackCosts | None = None
    beyond: str = "drop"
    seconds: float | None = None

    def calculate_matched_group(
        self, sequences: Sequence[tuple[Any, ...]], packing_length: int, is_finished: bool = True, strategy: str = ""
    ) -> tuple[list[list[tuple[Any, ...]]], list[tuple[Any, ...]]]:
        """Return the items of each pack, and those for the next call: the emptiest pack's, unless `is_finished`.

        Args:
            sequences: items (number, tokens, tiles), or (encoded sample, tokens) of a stream.
            packing_length: most tokens of a pack: `--packing_length`, or else `--max_length`.
        """
        if strategy == "sequential":
            say("warning: --packing_strategy sequential: packs of two budgets do not keep the order", error=True)
        packer = Packer(self.vit_budget, packing_length, self.costs, self.beyond, self.seconds)
        return (packer.groups(sequences, _size), []) if is_finished else packer.groups_and_rest(sequences, _size)

    def create_packed_idx(
        self, rank: int, offset: int, lengths: Sequence[Any], out_queue: Any, packing_length: int, packing_strategy: str
    ) -> None:
        """Pack a worker's part of a data set, and send packs of (number, tokens) to `out_queue` as they are made.

        Args:
            lengths: (tokens, tiles) of each sample, tiles None where they were not counted (`with_tiles`).
        """
        try:
            if uncounted := sum(tiles is None for _, tiles in lengths):
                say(
                    f"warning: {uncounted} of {len(lengths)} samples have no tiles counted, as in a cached data set "
                    "that was exported without this plugin: their packs keep to tokens alone; export it again with it",
                    error=True,
                )
            items = [(number, tokens, tiles or 0) for number, (tokens, tiles) in enumerate(lengths, offset)]
            waiting: list[tuple[Any, ...]] = []
            for first in range(0, len(items), BATCH):
                new = items[first : first + BATCH]
                finished = first + BATCH >= len(items)
                packs, waiting = self.calculate_matched_group(
                    [*waiting, *new], packing_length, finished, packing_strategy
                )
                out_queue.put((rank, [[item[:2] for item in pack] for pack in packs], len(new)))
        finally:  # the trainer waits for it without end
            out_queue.put((rank, [], -1))


def install(
    vit_budget: int, costs: PackCosts | None = None, beyond: str = "drop", seconds: float | None = None
) -> None:
    """Replace the packs of `--packing true` by packs of two budgets.

    Tiles are counted when ms-swift counts tokens, before training. A `--cached_dataset` must be exported with this
    plugin too: without, its samples count as texts, and a warning says how many. ms-swift without the plugin reads it
    as its own.

    Args:
        vit_budget: most tiles of a pack, of patches for models at native resolution (Qwen-VL: 4 a visual token).
        costs, beyond, seconds: as in `omnibal_ext.packing.pack`.

    Raises:
        UserError: an ms-swift that packs by other functions than those of 4.5.3 and 4.6, naming its version.
    """
    import swift
    from swift.dataset import packing
    from swift.pipelines.train import sft

    check_version(swift.__version__, packing, sft)

    class LengthsAndTiles(sft.AddLengthPreprocessor):
        def preprocess(self, row: dict[str, Any]) -> dict[str, Any]:
            encoded = self.template.encode(row, return_length=True)
            return {**row, "lengths": encoded["lengths"], TILES: tiles_of(encoded)}

    say(
        f"omnibal: packs of at most {vit_budget:,} tiles (of Qwen-VL: patches), and of --packing_length tokens; on a "
        "new machine the packer compiles first, for 15 s or more"
    )
    warm_up()  # before workers are forked
    budgets = TwoBudgets(vit_budget, costs, beyond, seconds)
    jobs_of = unwrap(packing.PackingDataset._worker_jobs)  # a worker may run the plugin again

    @wraps(jobs_of)
    def jobs_with_tiles(self: Any, jobs: Sequence[Sequence[Any]]) -> Any:
        return jobs_of(self, with_tiles(self.dataset, jobs))

    packing.calculate_matched_group = budgets.calculate_matched_group
    packing.PackingDataset.create_packed_idx = staticmethod(budgets.create_packed_idx)
    packing.PackingDataset._worker_jobs = jobs_with_tiles
    sft.AddLengthPreprocessor = LengthsAndTiles


def check_version(version: str, packing: Any, sft: Any) -> None:
    """Raise UserError unless ms-swift has what is replaced, with the parameters of 4.5.3 and 4.6 (`SIGNATURES`)."""
    found = {name: getattr(packing, name, getattr(packing.PackingDataset, name, None)) for name in SIGNATURES}
    wrong = [name for name, call in found.items() if not call or [*signature(call).parameters] != SIGNATURES[name]]
    if wrong or sft.PackingDataset is not packing.PackingDataset:
        what = f"{', '.join(wrong)} of swift.dataset.packing" if wrong else "another PackingDataset"
        raise UserError(
            f"ms-swift {version} packs by {what}, not as 4.5.3 and 4.6 do: pip install 'ms-swift>=4.5.3,<4.7'"
        )
    if "swift.dev.dataset" in sys.modules:
        raise UserError(f"ms-swift {version}: swift.dev packs by functions of its own: start it by `swift sft`")


def with_tiles(table: Any, jobs: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return the jobs for workers that pack a data set, with (tokens, tiles) of each sample in place of its lengths.

    Raises UserError for a cached data set in which an older plugin noted tiles as negative lengths.
    """
    while not hasattr(table, "column_names"):  # samples that are encoded when they are read: the table is behind them
        table = table.dataset
    tiles = list(table[TILES]) if TILES in table.column_names else [None] * len(table)
    made = []
    for rank, offset, lengths, *more in jobs:
        tokens = [length if isinstance(length, list) else [length] for length in lengths]
        if any(min(each, default=0) < 0 for each in tokens):
            raise UserError("the cached data set has lengths below 0, tiles of an older plugin: export it again")
        counted = zip(map(sum, tokens), tiles[offset : offset + len(tokens)], strict=True)
        made.append((rank, offset, list(counted), *more))
    return made


def _size(item: tuple[Any, ...]) -> tuple[int, int]:
    """Return (tiles, tokens) of an item."""
    return (item[2] if len(item) > 2 else tiles_of(item[0])), item[1]
