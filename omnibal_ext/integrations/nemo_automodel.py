"""NeMo Automodel: its balanced packing of vision data sets (`balance_media_tokens`), with packs that are alike.

from omnibal_ext.integrations.nemo_automodel import install
install()                                                # before the recipe runs
"""

from collections.abc import Sequence
from functools import partial

import numpy as np

from omnibal_ext.errors import UserError
from omnibal_ext.integrations.samples import epoch_effort
from omnibal_ext.output import say
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.in_memory import pack

ROOM = 1.05
"""Visual tokens of a pack by default: so many times the mean of full packs."""


def greedy_knapsack_vt_balanced(
    lengths: Sequence[int],
    max_length: int,
    visual_tokens: Sequence[int],
    *,
    visual_budget: int | None = None,
    costs: PackCosts | None = None,
    seconds: float | None = None,
) -> list[list[int]]:
    """Return packs as Automodel's function of this name does: sample numbers, none longer than `max_length`.

    Its own sorts packs by visual tokens, for ranks that read them in order; here every pack has about as many, and the
    order is random. A longer sample is left out, as there, and one beyond `visual_budget` too; a line says so.

    Args:
        lengths: tokens of each sample, visual ones included.
        visual_budget: most visual tokens of a pack. None: 1.05 times the mean of full packs, or the largest sample's.
        costs, seconds: as in `omnibal_ext.packing.pack`, by default with more effort; "tiles" are visual tokens here.
    """
    tokens, visual = np.maximum(np.asarray(lengths, np.int64), 1), np.asarray(visual_tokens, np.int64)
    if visual_budget is None and len(visual):
        mean = visual.sum() / max(1.0, tokens.sum() / max_length)
        visual_budget = max(int(visual.max()), int(np.ceil(ROOM * mean)))
    effort = epoch_effort(len(tokens), seconds)
    packs = pack(visual, tokens, visual_budget or 0, max_length, costs=costs, beyond="drop", seconds=effort)
    say(f"omnibal: {len(tokens):,} samples in {len(packs):,} packs")
    return packs


def install(visual_budget: int | None = None, costs: PackCosts | None = None, seconds: float | None = None) -> None:
    """Put `greedy_knapsack_vt_balanced` in the place of Automodel's. Raises UserError where that has none."""
    from nemo_automodel.components.datasets.vlm import neat_packing_vlm as theirs

    if not hasattr(theirs, "greedy_knapsack_vt_balanced"):
        raise UserError(f"{theirs.__file__}: has no greedy_knapsack_vt_balanced; nemo-automodel 0.7 has it")
    theirs.greedy_knapsack_vt_balanced = partial(
        greedy_knapsack_vt_balanced, visual_budget=visual_budget, costs=costs, seconds=seconds
    )
