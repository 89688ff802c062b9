"""Swap samples of equal cost between iterations if both then look more like the corpus.

    a cheap iteration of long videos only         video of 662 tokens, from the source with few samples here
    one of the same cost, rich in short samples   video of 660 tokens, from the source with many samples here

Where packs differ in cost, swapping complete packs leaves little choice. Samples of one cost come in many sizes,
sources and kinds, and swapping them hardly changes the packs' seconds. A sample may also move alone into a pack with
room.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.ordering.assignment import Assignment, assignment_of, move_sample, packs_of, still_fit
from omnibal_ext.packing.ordering.waiting import (
    ROUNDS,
    Iterations,
    allowed_wait,
    change_of_swap,
    falling_prices,
    iterations_of,
    swap,
    waited,
)
from omnibal_ext.packing.packs import PackList
from omnibal_ext.packing.random_bits import below

LOOKS_A_SECOND = 5_000_000  # pairs of samples tried per nominal second
LEAST_LOOKS, MOST_LOOKS = 8, 50  # per sample: fewer are useless, more change little
NEAR = 64  # greatest distance between the two samples of a pair, in an order of samples


class Samples(NamedTuple):
    """Samples in the order in which the packs hold them; features in standard deviations of packs."""

    sizes: Ints  # [N, K]
    seconds: Floats  # [N, parts] what each adds to its pack
    features: Floats  # [N, F] what each adds to its iteration's features
    kinds: NDArray[np.bool_]  # [N, kinds] membership in kinds that every iteration should have


def worth_swapping(samples: int, effort: float) -> bool:
    """Whether `effort` (nominal seconds) suffices to try every sample."""
    return samples > 0 and effort * LOOKS_A_SECOND >= LEAST_LOOKS * samples


def swap_samples(
    packs: PackList,
    samples: Samples,
    budgets: Ints,
    seconds: Floats,
    exchange_groups: Ints,
    slots: Ints,
    limit: float,
    seed: int,
    effort: float = 1.0,
) -> PackList:
    """Exchange samples between packs of different iterations, bringing iterations nearer to the mean in all features.

    1. Sort samples by seconds, by the fullest size, or at random; draw two that are near in that order.
    2. Swap them if squared feature distances and missing kinds fall by more than the price of the added waiting.
       Budgets and exchange groups must hold, waiting must stay within `limit`, and no iteration may lose a kind. If a
       swap fails, try moving one sample into the other's pack.
    3. Repeat; once waiting is within `limit`, the price of waiting falls. A missing kind counts as much as the expected
       distance of a random iteration in one feature.

    Args:
        budgets: of the sizes of `samples`, [K].
        seconds: of each pack, [P, parts].
        exchange_groups: number of each pack, [P]; only packs of equal number exchange samples.
        slots: all packs, [I, D, M].
        limit: fraction of time spent waiting.
        effort: number of steps, given in nominal seconds: a seed gives the same packs on any machine.

    Returns:
        As many packs, of the same samples.
    """
    count = len(packs.sample_ids)
    looks = int(effort * min(LOOKS_A_SECOND, MOST_LOOKS * count))
    iterations, ranks, micro_batches = slots.shape
    if iterations < 2 or not worth_swapping(count, effort) or not seconds.any():
        return packs
    unit = iterations * ranks / seconds.sum()
    features = np.add.reduceat(samples.features, packs.pack_offsets[:-1])
    each = Samples(
        *(np.concatenate([values, np.zeros_like(values[:1])]) for values in samples)
    )  # the last row is "no sample"
    each = each._replace(seconds=each.seconds * unit)
    state = iterations_of(seconds * unit, features - features.mean(axis=0), slots)
    ranks_of = np.empty(len(packs), np.int64)
    ranks_of[slots.ravel()] = np.arange(slots.size) // micro_batches
    assignment = assignment_of(packs, samples.sizes, ranks_of, exchange_groups)
    kind_counts = np.zeros((iterations, samples.kinds.shape[1]), np.int64)
    np.add.at(kind_counts, ranks_of[assignment.pack_of] // ranks, samples.kinds)
    orders = _orders(samples, budgets, seed)
    allowed, waiting = allowed_wait(limit, state), waited(state)
    prices = list(falling_prices(state, allowed))
    for number, price in enumerate(prices):
        for kind_of_order, order in enumerate(orders):
            worth = prices[0] if waiting > allowed else price, float(ranks * micro_batches)
            steps = 3 * (seed + number) + kind_of_order, looks // (3 * ROUNDS)
            waiting = _round(order, each, budgets, assignment, kind_counts, state, worth, waiting, allowed, *steps)
    return packs_of(assignment, packs.sample_ids)


def _orders(samples: Samples, budgets: Ints, seed: int) -> tuple[Ints, Ints, Ints]:
    """Return samples ordered by seconds, by the size that fills most of its budget, and at random; ties at random."""
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
    assignment: Assignment,
    kind_counts: Ints,
    state: Iterations,
    prices: tuple[float, float],
    waiting: float,
    allowed: float,
    seed: int,
    looks: int,
) -> float:
    """Try pairs of samples that are near in `order`; return the seconds waited afterwards.

    `kind_counts` [I, kinds] is the number of samples of each kind in each iteration.
    """
    ranks, nothing = len(state.loads) // len(state.sums), len(order)
    price, missing = prices
    for look in range(looks):
        position = below(len(order), seed, 2 * look)
        other_position = position + 1 + below(NEAR, seed, 2 * look + 1)
        if other_position >= len(order):
            continue
        one, two = order[position], order[other_position]
        here, there = assignment.pack_of[one], assignment.pack_of[two]
        rank, other_rank = assignment.rank_of[here], assignment.rank_of[there]
        first, second = rank // ranks, other_rank // ranks
        if first == second or assignment.exchange_groups[here] != assignment.exchange_groups[there]:
            continue
        for arriving in (two, nothing):
            if arriving == nothing and assignment.counts[here] == 1:
                continue
            if not still_fit(assignment, samples.sizes, budgets, here, there, one, arriving):
                continue
            fewer = _fewer_missing(samples.kinds, kind_counts, first, second, one, arriving)
            if fewer < 0:
                continue
            further, longer = change_of_swap(state, rank, other_rank, samples.seconds, samples.features, one, arriving)
            worth = price * longer + further - missing * fewer < -1e-9
            if worth and (longer <= 0 or waiting + longer <= allowed):
                waiting += longer
                swap(state, rank, other_rank, samples.seconds, samples.features, one, arriving)
                for kind in range(kind_counts.shape[1]):
                    moved = int(samples.kinds[arriving, kind]) - int(samples.kinds[one, kind])
                    kind_counts[first, kind] += moved
                    kind_counts[second, kind] -= moved
                move_sample(assignment, samples.sizes, one, there)
                if arriving != nothing:
                    move_sample(assignment, samples.sizes, arriving, here)
                break
    return waiting


@numba.njit(cache=True)
def _fewer_missing(kinds: NDArray[np.bool_], kind_counts: Ints, first: int, second: int, one: int, two: int) -> float:
    """Return how many missing kinds two iterations gain by swapping `one` for `two`; -1: one would lose a kind."""
    fewer = 0.0
    for kind in range(kinds.shape[1]):
        if kinds[one, kind] == kinds[two, kind]:
            continue
        loses, gains = (first, second) if kinds[one, kind] else (second, first)
        if kind_counts[loses, kind] == 1:
            return -1.0
        if kind_counts[gains, kind] == 0:
            fewer += 1.0
    return fewer
