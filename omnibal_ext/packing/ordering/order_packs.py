"""Order the packs of a corpus, or of a sub-epoch: equal packs, balanced ranks, iterations that look like the corpus."""

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.balance_ranks import balance_iterations, balance_ranks, split_leftover, stored_order
from omnibal_ext.packing.ordering.equalize_packs import equalize_packs, worth_equalizing
from omnibal_ext.packing.ordering.metrics import rank_loads, wait
from omnibal_ext.packing.ordering.order_iterations import order_iterations
from omnibal_ext.packing.ordering.spread import pack_features
from omnibal_ext.packing.packs import LOADS, PackList, pack_loads
from omnibal_ext.packing.widths import limited_sizes

PACK_EFFORT = 0.5  # of the effort, for packs; the rest for ranks that run several
MANY = 1 << 16  # packs; more take as many times the effort, or too little would be left for each
OF_MANY = 0.6, 1.0  # of the effort, for equalizing and for ordering these
UNEVEN, AGAIN = 4.0, 2.7  # where these deviate by so many times the wait, they get so many times the effort more;
# with more, few packs would be drawn for each exchange (`equalize_packs.FEW_STEPS`), and iterations differ more
CHUNK, CHUNK_ITERATIONS = 1 << 14, 256  # packs, iterations of many that are ordered together, in a processor's cache


def order_packs(
    corpus: Corpus,
    built: PackList,
    options: PackOptions,
    costs: PackCosts,
    seed: int,
    exchange_groups: Ints | None = None,
    others: PackList | None = None,
) -> PackList:
    """Return packs in the order of iterations, leftover packs last.

    1. Equalize the seconds of packs, then of ranks where each runs several packs an iteration. More than `MANY`
       (65,536) that each have a rank of their own are equalized once more where they still cost too differently
       (`UNEVEN`).
    2. Order packs so that ranks wait at most the fraction `options.wait` and iterations look like the corpus; more than
       `MANY` packs in random chunks, with as much effort for each pack as `MANY` have.

    Features are divided by their standard deviation over the packs as built, so that all weigh alike.

    Args:
        exchange_groups: number of each pack, ascending, [P]; only packs of equal number exchange samples. None: all do.
        others: packs of another sub-epoch. Packs that share a sample with them become leftover only if other packs do
            not suffice.
    """
    sizes, many = corpus.sizes, len(built) / MANY
    equalizing, ordering = (options.seconds * (many * share if many > 1 else 1.0) for share in OF_MANY)
    exchange_groups = np.zeros(len(built), np.int64) if exchange_groups is None else exchange_groups
    several = options.micro_batches > 1 and options.data_parallel_size > 1  # a single rank never waits

    def equalized(packs: PackList, ranks: Ints, fraction: float) -> PackList:
        if not worth_equalizing(packs, fraction * equalizing):
            return packs
        ids = packs.sample_ids
        own = sizes.take(ids)  # which may be few of the corpus
        of_samples, limits = costs.of_samples(own, options.one_sum), limited_sizes(own, options)
        same = PackList(packs.pack_offsets, np.arange(len(ids)))
        equal = equalize_packs(same, *limits, of_samples, ranks, exchange_groups, seed, fraction * equalizing)
        return PackList(equal.pack_offsets, ids[equal.sample_ids])

    def loads_and_seconds(packs: PackList) -> tuple[Ints, Floats]:
        loads = pack_loads(packs, sizes)
        return loads, costs.waited_for(loads, (*LOADS, *sizes.more), options.one_sum)

    packs = equalized(built, np.arange(len(built)), PACK_EFFORT if several else 1.0)
    loads, seconds = loads_and_seconds(packs)
    total, of_one_pack = seconds.sum(axis=1), options.data_parallel_size if options.micro_batches == 1 else 0
    if many > 1 and of_one_pack > 1 and total.std() > UNEVEN * options.wait * total.mean():
        packs = equalized(packs, np.arange(len(built)), AGAIN)
        loads, seconds = loads_and_seconds(packs)
    count, avoid = len(packs) % options.global_batch, _repeats_sample_of(packs, others)
    leftover, running = split_leftover(seconds, count, avoid, ranks=of_one_pack, limit=options.wait)
    if len(running) == 0:
        return packs.reordered(leftover)
    chunks = _chunks(running, options.global_batch, seed)
    each = ordering / len(chunks)
    packs_of_ranks = [chunk[balance_ranks(seconds[chunk], options.micro_batches, seed, each)] for chunk in chunks]
    if several:
        rank_of = np.full(len(packs), -1, np.int64)
        rank_of[np.concatenate(packs_of_ranks)] = np.arange(len(running) // options.micro_batches)[:, None]
        packs = equalized(packs, rank_of, 1 - PACK_EFFORT)
        loads, seconds = loads_and_seconds(packs)
    found = pack_features(corpus, packs, loads)
    as_built = found if packs is built else pack_features(corpus, built, pack_loads(built, sizes))
    features = found.scaled(as_built.deviations())
    limit = _limit_of_wait(seconds, leftover, running, options)
    slots = []
    for chunk in packs_of_ranks:
        numbers, ranks = chunk.ravel(), np.arange(chunk.size).reshape(chunk.shape)
        arguments = options.data_parallel_size, limit, seed, each
        slots.append(numbers[order_iterations(seconds[numbers], features[numbers], ranks, *arguments)])
    return packs.reordered(np.concatenate([stored_order(np.concatenate(slots)).ravel(), leftover]))


def _chunks(packs: Ints, global_batch: int, seed: int) -> list[Ints]:
    """Return all packs in one chunk; more than `MANY` in random chunks of `CHUNK` packs or 256 iterations."""
    if len(packs) <= MANY:
        return [packs]
    count = -(-len(packs) // max(CHUNK, CHUNK_ITERATIONS * global_batch))
    iterations = np.random.default_rng((seed, 3)).permutation(packs).reshape(-1, global_batch)
    return [np.sort(chunk, axis=None) for chunk in np.array_split(iterations, min(count, len(iterations)))]


def _limit_of_wait(seconds: Floats, leftover: Ints, running: Ints, options: PackOptions) -> float:
    """Return the fraction that complete iterations may wait: less than `options.wait` if the last one waits for more.

    That is estimated for ranks with one pack from each M-quantile of cost. At most half of the allowed wait is
    deducted.
    """
    may, micro_batches = options.wait, options.micro_batches
    missing = options.global_batch - len(leftover)
    if len(leftover) == 0 or options.last_iteration == "empty":
        return may
    by_cost = running[np.argsort(seconds[running].sum(axis=1), kind="stable")]
    turns = np.arange(missing)
    middles = (2 * (turns % micro_batches) + 1) * len(running) // (2 * micro_batches)
    others = by_cost[np.minimum(middles + turns // micro_batches, len(running) - 1)]
    last = balance_iterations(seconds, np.concatenate([leftover, others])[None], options.data_parallel_size)
    beyond = wait(rank_loads(last, seconds)) - may
    return may - min(max(0.0, beyond / (len(running) // options.global_batch)), may / 2)


def _repeats_sample_of(packs: PackList, others: PackList | None) -> NDArray[np.bool_] | None:
    """Return which packs share a sample with `others`, [P]; None without others."""
    if others is None or len(others) == 0:
        return None
    return np.logical_or.reduceat(np.isin(packs.sample_ids, others.sample_ids), packs.pack_offsets[:-1])
