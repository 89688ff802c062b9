"""How LoongForge levels the packs of a step, written anew by what it does, and what that brings.

    python benchmarks/peer_balancing.py [--ranks 256 512] [--samples 96000] [--corpora NAME...]

Samples of a step go to other ranks by what their tokens are expected to take, a len^2 + b len + c (for all of a model):

1. a, b, c are fitted to the first steps. It fits the slowest rank's seconds of ten steps; here every pack's are known.
2. A step stays as it is if the slowest rank takes less than 1.2 times the mean, or one sample takes more than the mean.
3. Else samples go, dearest first, to the rank with least so far that then has at most 1.2 times the mean tokens; to the
   rank with least if none has.
4. Up to 20 times, while the slowest takes 5% more than the quickest, the slowest gives the quickest its dearest sample,
   or exchanges it for that one's cheapest, whichever levels the step more, if both keep to the tokens.

Packs are made by tokens alone, as samples come, and then levelled: as LoongForge is set, and (without 2) every step;
beside it is what `omnibal pack` orders. Lengths alone, no model is run: seconds are as in `peer_waiting.py`, each rank
runs all of the model. "more" is samples a second over the packs as they come, "imbalance" how much longer than the mean
the slowest rank takes. LoongForge published 698.64 and 721.65 tokens a second and GPU at 256 ranks, 635.51 and 694.84
at 512: 3.3% and 9.3% more. The last line is the median of what its levelling of every step brings, and of ours.
"""

import argparse
import sys
from pathlib import Path
from statistics import median

import numpy as np
from scipy.optimize import nnls

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.level import corpus_of
from benchmarks.peer_orders import Pack, Question, Steps, internvl_packed
from benchmarks.peer_waiting import INDEX, MODELS, by_index, fullest, one_part
from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.console import print_table
from omnibal_ext.errors import run_tool
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.packs import LOADS, PackList, pack_loads
from omnibal_ext.sizes import Sizes

TRIGGER, MOST_TOKENS, GAP, EXCHANGES, WARM_UP = 1.2, 1.2, 0.05, 20, 10
AS_SET, ALWAYS, COME = "LoongForge's levelling", "LoongForge's, of every step", "by tokens, as they come"


def loads_of(steps: Steps, seconds: Floats, tokens: Ints) -> Floats:
    """What each sample is expected to take, [N], by the seconds [steps, ranks] of the first steps' packs."""
    packs = [tokens[list(pack)] for step in steps[:WARM_UP] for pack in step]
    known = np.array([[np.sum(own**2), own.sum(), len(own)] for own in packs], dtype=np.float64)
    scale = known.max(axis=0)
    fit = nnls(known / scale, seconds[:WARM_UP].ravel())[0] / scale
    return np.stack([tokens**2, tokens, np.ones_like(tokens)], axis=1) @ fit


def levelled(step: list[Pack], loads: Floats, tokens: Ints, trigger: float = TRIGGER) -> list[Pack]:
    """The packs of a step after its samples went to other ranks, or as they were."""
    each = [float(loads[list(pack)].sum()) for pack in step]
    mean, samples = sum(each) / len(each), [sample for pack in step for sample in pack]
    if max(each) < trigger * mean or max(loads[samples]) > mean:
        return step
    most = MOST_TOKENS * sum(int(tokens[sample]) for sample in samples) / len(step)
    packs = _dealt(sorted(samples, key=lambda sample: -loads[sample]), len(step), loads, tokens, most)
    for _ in range(EXCHANGES):
        each = [float(loads[pack].sum()) for pack in packs]
        slowest, quickest = int(np.argmax(each)), int(np.argmin(each))
        if each[slowest] - each[quickest] < GAP * each[quickest]:
            break
        tried = [_exchanged(packs, slowest, quickest, loads, back) for back in (False, True)]
        fitting = [found for found in tried if all(tokens[found[at]].sum() <= most for at in (slowest, quickest))]
        best = min(fitting, key=lambda found: _spread(found, loads), default=packs)
        if _spread(best, loads) >= _spread(packs, loads):
            break
        packs = best
    return list(packs)


def _dealt(samples: list[int], ranks: int, loads: Floats, tokens: Ints, most: float) -> list[list[int]]:
    packs: list[list[int]] = [[] for _ in range(ranks)]
    taken, held = np.zeros(ranks), np.zeros(ranks, np.int64)
    for sample in samples:
        room = held + tokens[sample] <= most
        rank = int(np.argmin(np.where(room, taken, np.inf) if room.any() else taken))
        packs[rank].append(sample)
        taken[rank] += loads[sample]
        held[rank] += tokens[sample]
    return packs


def _exchanged(packs: list[list[int]], slowest: int, quickest: int, loads: Floats, back: bool) -> list[list[int]]:
    """The dearest sample of one pack in the other, and if `back` that one's cheapest in its place."""
    dearest, cheapest = max(packs[slowest], key=loads.__getitem__), min(packs[quickest], key=loads.__getitem__)
    found = list(packs)
    found[slowest] = [one for one in packs[slowest] if one != dearest] + [cheapest] * back
    found[quickest] = [one for one in packs[quickest] if one != cheapest or not back] + [dearest]
    return found


def _spread(packs: list[list[int]], loads: Floats) -> float:
    return float(np.ptp([loads[pack].sum() for pack in packs]))


def seconds_of(steps: Steps, sizes: Sizes, costs: PackCosts) -> Floats:
    """Of every pack, [steps, ranks]."""
    packs = PackList.from_lists([list(pack) for step in steps for pack in step])
    return costs.seconds(pack_loads(packs, sizes), LOADS).sum(axis=1).reshape(len(steps), -1)


def compare(name: str, samples: int, ranks: int, size: str) -> dict[str, float]:
    """Print a table; return how many more samples a second each way brings."""
    sizes, budgets = corpus_of(name, samples)
    costs = one_part(PackCosts.of_model(f"{MODELS[name]}-{size}", "h100", *budgets))
    asked = Question(sizes.tokens.tolist(), sizes.tiles.tolist(), [0] * len(sizes), budgets[1], int(sizes.tiles.sum()),
                     1, ranks, 0)  # fmt: skip
    ways = {COME: internvl_packed(asked)}
    loads = loads_of(ways[COME], seconds_of(ways[COME], sizes, costs), sizes.tokens)
    for way, trigger in ((AS_SET, TRIGGER), (ALWAYS, 1.0)):
        ways[way] = [levelled(step, loads, sizes.tokens, trigger) for step in ways[COME]]
    ways[INDEX] = by_index(sizes, budgets, ranks, costs)
    rows, rates = [], {}
    for way, steps in ways.items():
        seconds = seconds_of(steps, sizes, costs)
        slowest, mean = seconds.max(axis=1), seconds.mean(axis=1)
        rates[way] = sum(len(pack) for step in steps for pack in step) / float(slowest.sum())
        tokens = max(int(sizes.tokens[list(pack)].sum()) for step in steps for pack in step)
        rows.append((way, len(steps), f"{fullest(steps, sizes) / budgets[0]:.2f}", f"{tokens / budgets[1]:.2f}",
                     f"{np.mean(slowest / mean - 1):.3f}", f"{1 - mean.sum() / slowest.sum():.3f}",
                     f"{rates[way] / rates[COME] - 1:+.1%}"))  # fmt: skip
    print_table(f"{name}: {len(sizes):,} samples, {ranks} ranks, {size.upper()}",
                ("", "steps", "tiles", "tokens", "imbalance", "waiting", "more"), rows)  # fmt: skip
    return {way: rate / rates[COME] - 1 for way, rate in rates.items()}


def main() -> None:
    """Print the tables, and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 512], help="data-parallel ranks")
    parser.add_argument("--samples", type=int, default=96_000)
    parser.add_argument("--corpora", nargs="+", choices=MODELS, default=list(MODELS))
    arguments = parser.parse_args()
    found = [compare(name, arguments.samples, ranks, size) for ranks in arguments.ranks
             for name in arguments.corpora for size in ("2b", "8b")]  # fmt: skip
    theirs, ours = (median(more[way] for more in found) for way in (ALWAYS, INDEX))
    print(f"samples a second over packs as they come, median: LoongForge's levelling {theirs:+.1%}, ours {ours:+.1%}")


if __name__ == "__main__":
    run_tool(main)
