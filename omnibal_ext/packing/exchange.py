"""Samples change iterations: one goes for another that costs as much, where both iterations teach better then.

    a cheap iteration of long videos only         video of 662 tokens, of the source with few
    one of the same cost, rich in short samples   video of 660 tokens, of the source with many

Packs are what makes an iteration level, so whole packs leave little choice where they hardly cost the same. Samples of
equal cost are of many sizes, sources and kinds; exchanged one for one, they leave packs as level as they were. A pack
that has room takes a sample for nothing: what all packs lack is the same in all iterations then.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.packing.iterations import (
    ROUNDS,
    Iterations,
    falling_prices,
    further,
    iterations_of,
    most_to_wait,
    replace,
    waited,
    waited_longer,
)
from omnibal_ext.packing.packs import Packs, offsets_of
from omnibal_ext.packing.random_bits import below
from omnibal_ext.packing.twins import NEAR, in_order_of_the_fullest, still_fit

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LOOKS_A_SECOND = 5_000_000  # at two samples
LEAST_LOOKS, MOST_LOOKS = 8, 50  # of a sample: fewer are not worth the while, more bring little


class Samples(NamedTuple):
    """The samples of packs, in the order in which packs hold them; features are in deviations of packs."""

    sizes: Ints  # [N, K]
    seconds: Floats  # [N, parts] what each adds to its pack
    features: Floats  # [N, F] what each adds to what its iteration should have as much of as others
    kinds: NDArray[np.bool_]  # [N, kinds] those of which no iteration should have none


class _Places(NamedTuple):
    """Where samples and packs are."""

    owners: Ints  # [N] the pack of each sample
    counts: Ints  # [P] samples
    kin: Ints  # [P]
    runs_on: Ints  # [P] rank, counted through all iterations
    loads: Ints  # [P, K]
    held: Ints  # [I, kinds] samples of each kind


def worth_exchanging(samples: int, effort: float) -> bool:
    """Whether there is time for each sample to meet others."""
    return samples > 0 and effort * LOOKS_A_SECOND >= LEAST_LOOKS * samples


def exchange_samples(
    packs: Packs,
    samples: Samples,
    budgets: Ints,
    seconds: Floats,
    kin: Ints,
    dealt: Ints,
    limit: float,
    seed: int,
    effort: float = 1.0,
) -> Packs:
    """Return as many packs of the same samples, in iterations that are nearer to the mean in all features.

    1. Samples stand in the order of their seconds, in that of the fullest size, or at random. Two that stand near are
       drawn.
    2. They change places where the features' squared distances, and iterations that miss a kind, fall by more than the
       price of what is waited longer; if budgets hold, packs are of one kin, no more than `limit` is waited, and no
       iteration comes to miss a kind. Else the one joins the other in its pack, if that does.
    3. Repeat, at a price of waiting that falls once no more is waited than may be. An iteration that misses a kind is
       as bad as one that is as far from the mean, in one feature, as random ones are.

    Args:
        budgets: of the sizes of `samples`, [K].
        seconds: of each pack, [P, parts].
        kin: number of each pack; only packs of the same number exchange samples, [P].
        dealt: all packs, [I, D, M].
        limit: share of time spent waiting.
        effort: nominal seconds; counts steps, so that the same seed gives the same packs anywhere.
    """
    count = len(packs.sample_ids)
    looks = int(effort * min(LOOKS_A_SECOND, MOST_LOOKS * count))
    iterations, ranks, micro_batches = dealt.shape
    if iterations < 2 or not worth_exchanging(count, effort) or not seconds.any():
        return packs
    starts, unit = packs.pack_offsets[:-1], iterations * ranks / seconds.sum()
    features = np.add.reduceat(samples.features, starts)
    each = Samples(*(np.concatenate([values, np.zeros_like(values[:1])]) for values in samples))  # the last is nothing
    each = each._replace(seconds=each.seconds * unit)
    state = iterations_of(seconds * unit, features - features.mean(axis=0), dealt)
    runs_on = np.empty(len(packs), np.int64)
    runs_on[dealt.ravel()] = np.arange(dealt.size) // micro_batches
    owners = np.repeat(np.arange(len(packs)), packs.counts)
    held = np.zeros((iterations, samples.kinds.shape[1]), np.int64)
    np.add.at(held, runs_on[owners] // ranks, samples.kinds)
    places = _Places(owners, packs.counts, kin, runs_on, np.add.reduceat(samples.sizes, starts), held)
    random = np.random.default_rng(seed).permutation(count)
    by_seconds = random[np.argsort(samples.seconds.sum(axis=1)[random], kind="stable")]
    orders = by_seconds, in_order_of_the_fullest(samples.sizes, budgets, seed), random
    allowed, waiting = most_to_wait(limit, state), waited(state)
    prices = list(falling_prices(state, allowed))
    for number, price in enumerate(prices):
        for way, order in enumerate(orders):
            worth = prices[0] if waiting > allowed else price, float(ranks * micro_batches)
            steps = 3 * (seed + number) + way, looks // (3 * ROUNDS)
            waiting = _round(order, each, budgets, places, state, worth, waiting, allowed, *steps)
    return Packs(offsets_of(places.counts), packs.sample_ids[np.argsort(owners, kind="stable")])


@numba.njit(cache=True)
def _round(
    order: Ints,
    samples: Samples,
    budgets: Ints,
    places: _Places,
    state: Iterations,
    prices: tuple[float, float],
    waiting: float,
    allowed: float,
    seed: int,
    looks: int,
) -> float:
    """Look at pairs of samples that stand near each other in `order`; return what is waited then."""
    ranks = state.loads.shape[1]
    price, missing = prices
    seconds, features, nothing = samples.seconds, samples.features, len(order)
    for look in range(looks):
        place = below(len(order), seed, 2 * look)
        another = place + 1 + below(NEAR, seed, 2 * look + 1)
        if another >= len(order):
            continue
        one, two = order[place], order[another]
        here, there = places.owners[one], places.owners[two]
        rank, other_rank = places.runs_on[here], places.runs_on[there]
        first, second = rank // ranks, other_rank // ranks
        if first == second or places.kin[here] != places.kin[there]:
            continue
        for come in (two, nothing):
            if come == nothing and places.counts[here] == 1:
                continue
            if not still_fit(samples.sizes, places.loads, budgets, here, there, one, come):
                continue
            fewer = _fewer_missing(samples.kinds, places.held, first, second, one, come)
            if fewer < 0:
                continue
            change = further(state, first, second, features, one, come) - missing * fewer
            more = waited_longer(state, first, rank % ranks, seconds, one, come)
            more += waited_longer(state, second, other_rank % ranks, seconds, come, one)
            if change + price * more < -1e-9 and (more <= 0 or waiting + more <= allowed):
                waiting += more
                replace(state, first, rank % ranks, seconds, features, one, come)
                replace(state, second, other_rank % ranks, seconds, features, come, one)
                _move(samples, places, one, there, second, first)
                if come != nothing:
                    _move(samples, places, come, here, first, second)
                break
    return waiting


@numba.njit(cache=True)
def _fewer_missing(kinds: NDArray[np.bool_], held: Ints, first: int, second: int, one: int, two: int) -> float:
    """Return how many kinds no longer miss in two iterations, if sample `one` goes to the second for `two`.

    -1: an iteration would come to miss one.
    """
    fewer = 0.0
    for kind in range(kinds.shape[1]):
        if kinds[one, kind] == kinds[two, kind]:
            continue
        loses, gains = (first, second) if kinds[one, kind] else (second, first)
        if held[loses, kind] == 1:
            return -1.0
        if held[gains, kind] == 0:
            fewer += 1.0
    return fewer


@numba.njit(cache=True)
def _move(samples: Samples, places: _Places, sample: int, to: int, iteration: int, left: int) -> None:
    """Put a sample into a pack that runs in an iteration, from one that runs in the iteration `left`."""
    before = places.owners[sample]
    places.owners[sample] = to
    places.counts[before] -= 1
    places.counts[to] += 1
    for size in range(samples.sizes.shape[1]):
        places.loads[before, size] -= samples.sizes[sample, size]
        places.loads[to, size] += samples.sizes[sample, size]
    for kind in range(samples.kinds.shape[1]):
        if samples.kinds[sample, kind]:
            places.held[left, kind] -= 1
            places.held[iteration, kind] += 1
