"""Samples change iterations: one goes for another that costs as much, where both iterations look more like the corpus.

    a cheap iteration of long videos only         video of 662 tokens, of the source with few
    one of the same cost, rich in short samples   video of 660 tokens, of the source with many

Packs are what keeps an iteration from waiting, so whole packs leave little choice where they hardly cost the same.
Samples of equal cost are of many sizes, sources and kinds; exchanged one for one, they leave packs as they were. A pack
that has room takes a sample for nothing: what all packs lack is the same in all iterations then.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.ordering.places import Places, packs_of, places_of, put, still_fit
from omnibal_ext.packing.ordering.waiting import (
    ROUNDS,
    Iterations,
    change_of_swap,
    falling_prices,
    iterations_of,
    most_to_wait,
    swap,
    waited,
)
from omnibal_ext.packing.packs import Packs
from omnibal_ext.packing.random_bits import below

LOOKS_A_SECOND = 5_000_000  # at two samples
LEAST_LOOKS, MOST_LOOKS = 8, 50  # of a sample: fewer are not worth the while, more bring little
NEAR = 64  # places apart, in an order of samples


class Samples(NamedTuple):
    """The samples of packs, in the order in which packs hold them; features are in deviations of packs."""

    sizes: Ints  # [N, K]
    seconds: Floats  # [N, parts] what each adds to its pack
    features: Floats  # [N, F] what each adds to what its iteration should have as much of as others
    kinds: NDArray[np.bool_]  # [N, kinds] those of which no iteration should have none


def worth_swapping(samples: int, effort: float) -> bool:
    """Whether there is time for each sample to meet others."""
    return samples > 0 and effort * LOOKS_A_SECOND >= LEAST_LOOKS * samples


def swap_samples(
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
    if iterations < 2 or not worth_swapping(count, effort) or not seconds.any():
        return packs
    unit = iterations * ranks / seconds.sum()
    features = np.add.reduceat(samples.features, packs.pack_offsets[:-1])
    each = Samples(*(np.concatenate([values, np.zeros_like(values[:1])]) for values in samples))  # the last is nothing
    each = each._replace(seconds=each.seconds * unit)
    state = iterations_of(seconds * unit, features - features.mean(axis=0), dealt)
    ranks_of = np.empty(len(packs), np.int64)
    ranks_of[dealt.ravel()] = np.arange(dealt.size) // micro_batches
    places = places_of(packs, samples.sizes, ranks_of, kin)
    held = np.zeros((iterations, samples.kinds.shape[1]), np.int64)
    np.add.at(held, ranks_of[places.owners] // ranks, samples.kinds)
    orders = _orders(samples, budgets, seed)
    allowed, waiting = most_to_wait(limit, state), waited(state)
    prices = list(falling_prices(state, allowed))
    for number, price in enumerate(prices):
        for way, order in enumerate(orders):
            worth = prices[0] if waiting > allowed else price, float(ranks * micro_batches)
            steps = 3 * (seed + number) + way, looks // (3 * ROUNDS)
            waiting = _round(order, each, budgets, places, held, state, worth, waiting, allowed, *steps)
    return packs_of(places, packs.sample_ids)


def _orders(samples: Samples, budgets: Ints, seed: int) -> tuple[Ints, Ints, Ints]:
    """Samples by seconds, by the size of which packs have most of the budget, and at random; equal ones at random."""
    random = np.random.default_rng(seed).permutation(len(samples.sizes))
    fullest = int(np.argmax(samples.sizes.sum(axis=0) / np.maximum(budgets, 1)))
    keys = samples.seconds.sum(axis=1), samples.sizes[:, fullest]
    by_seconds, by_size = (random[np.argsort(key[random], kind="stable")] for key in keys)
    return by_seconds, by_size, random


@numba.njit(cache=True)
def _round(
    order: Ints,
    samples: Samples,
    budgets: Ints,
    places: Places,
    held: Ints,
    state: Iterations,
    prices: tuple[float, float],
    waiting: float,
    allowed: float,
    seed: int,
    looks: int,
) -> float:
    """Look at pairs of samples that stand near each other in `order`; return what is waited then.

    `held` [I, kinds] counts the samples of each kind in each iteration.
    """
    ranks, nothing = len(state.loads) // len(state.sums), len(order)
    price, missing = prices
    for look in range(looks):
        place = below(len(order), seed, 2 * look)
        another = place + 1 + below(NEAR, seed, 2 * look + 1)
        if another >= len(order):
            continue
        one, two = order[place], order[another]
        here, there = places.owners[one], places.owners[two]
        rank, other_rank = places.ranks[here], places.ranks[there]
        first, second = rank // ranks, other_rank // ranks
        if first == second or places.kin[here] != places.kin[there]:
            continue
        for come in (two, nothing):
            if come == nothing and places.counts[here] == 1:
                continue
            if not still_fit(places, samples.sizes, budgets, here, there, one, come):
                continue
            fewer = _fewer_missing(samples.kinds, held, first, second, one, come)
            if fewer < 0:
                continue
            further, longer = change_of_swap(state, rank, other_rank, samples.seconds, samples.features, one, come)
            worth = price * longer + further - missing * fewer < -1e-9
            if worth and (longer <= 0 or waiting + longer <= allowed):
                waiting += longer
                swap(state, rank, other_rank, samples.seconds, samples.features, one, come)
                for kind in range(held.shape[1]):
                    moved = int(samples.kinds[come, kind]) - int(samples.kinds[one, kind])
                    held[first, kind] += moved
                    held[second, kind] -= moved
                put(places, samples.sizes, one, there)
                if come != nothing:
                    put(places, samples.sizes, come, here)
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
