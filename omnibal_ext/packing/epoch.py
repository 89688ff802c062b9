"""One epoch of a corpus: its samples as packs, in the order in which they run."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.packing.balanced import pack_balanced
from omnibal_ext.packing.baselines import pack_device_group, pack_length_group, pack_random
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.deal import deal, deal_level, stored_order
from omnibal_ext.packing.even import even_packs, worth_evening
from omnibal_ext.packing.exchange import Samples, exchange_samples, worth_exchanging
from omnibal_ext.packing.isf import pack_isf
from omnibal_ext.packing.level import WAIT_TO_SPEND, order_packs
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packs import LOADS, Packs, pack_loads
from omnibal_ext.packing.teach import pack_features
from omnibal_ext.sizes import Sizes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Epoch(NamedTuple):
    """Packs in the order in which they run, what each costs, and how many groups of one global batch a part has."""

    packs: Packs
    loads: Ints
    groups: list[int]


def pack_epoch(corpus: Corpus, reasons: NDArray[np.int8], options: PackOptions, costs: PackCosts, epoch: int) -> Epoch:
    """Pack one epoch and order its packs by iteration.

    1. Take each part's samples; those that `reasons` is above 0 for are left out, or set apart.
    2. Pack each part, and in it each group of samples that may share packs, for itself; let its packs cost the same.
    3. Order the packs of each part; those that fill no iteration come behind all parts.
    4. Let samples of each part change iterations, one for one, where these teach better then.

    Raises:
        UserError: the weights leave no sample.
    """
    seed = options.seed + epoch
    packed = reasons == 0 if options.oversize == "reject" else np.ones(len(reasons), np.bool_)
    most_parts = max(1, int(corpus.sizes.tokens.sum()) // (options.llm_budget * options.global_batch))
    parts = [samples for samples in corpus.epoch_samples(epoch, options.seed, packed, most_parts) if len(samples)]
    if not parts:
        raise UserError(f"epoch {epoch} has no samples: raise --weights, or pack more input files")
    done, groups, rest = [], [], Packs.concatenate([])
    for samples in parts:
        part, found, kin = _pack_part(corpus, samples, reasons, options, costs, seed)
        if options.method == "balanced":
            part = ordered(corpus, part, found, options, costs, seed, kin, _holds(part, rest))
        else:
            part = part.reordered(baseline_order(len(part), options, seed))
        groups.append(len(part) // options.global_batch)
        whole = groups[-1] * options.global_batch
        done.append(part.part(0, whole))
        rest = Packs.concatenate([rest, part.part(whole, len(part))])
    if options.method == "balanced":
        rest = _level(rest, corpus.sizes, options, costs)
    packs = Packs.concatenate([*done, rest])
    return Epoch(packs, pack_loads(packs, corpus.sizes, options.pad), groups)


def pack(sizes: Sizes, options: PackOptions, seed: int | None = None) -> Packs:
    """Pack samples that all fit the budgets, by the method of `options`."""
    seed = options.seed if seed is None else seed
    packers: dict[str, Callable[[], Packs]] = {
        "balanced": lambda: pack_balanced(sizes, options.vit_budget, options.llm_budget, options.budgets, seed=seed),
        "isf": lambda: pack_isf(sizes, options.vit_budget, options.llm_budget, seed=seed),
        "random": lambda: pack_random(sizes, options.samples_per_pack, seed),
        "length_group": lambda: pack_length_group(sizes, options.samples_per_pack, seed),
        "device_group": lambda: pack_device_group(
            sizes, options.samples_per_pack, options.data_parallel_size, options.micro_batches, seed
        ),
    }
    return packers[options.method]()


def even(packs: Packs, sizes: Sizes, options: PackOptions, costs: PackCosts, seed: int) -> Packs:
    """Make packs that cost as much as each other, as far as the budgets let them."""
    if not worth_evening(packs, options.seconds):
        return packs
    columns, budgets = _budgeted(sizes, options)
    seconds = costs.of_samples(sizes, options.one_sum)
    return even_packs(packs, columns, budgets, seconds, options.micro_batches, seed, options.seconds)


def ordered(
    corpus: Corpus,
    packs: Packs,
    found: Packs,
    options: PackOptions,
    costs: PackCosts,
    seed: int,
    kin: Ints | None = None,
    together: NDArray[np.bool_] | None = None,
) -> Packs:
    """Return packs by iteration, those that fill none last; samples change iterations where these teach better then.

    Args:
        found: packs before they were made even. Iterations of these, in a random order, teach well enough, so that what
            these packs differ by is what counts as much in each feature.
        kin: number of each pack; only packs of the same number exchange samples, [P]. Without, all do.
        together: packs that are not left for last, if the others suffice, [P].
    """
    kin = np.zeros(len(packs), np.int64) if kin is None else kin
    names = (*LOADS, *corpus.sizes.more)
    loads = pack_loads(packs, corpus.sizes)
    seconds = costs.waited_for(loads, names, options.one_sum)
    deviations = pack_features(corpus, found, pack_loads(found, corpus.sizes), names).deviations()
    features = pack_features(corpus, packs, loads, names).scaled(deviations)
    shape = options.data_parallel_size, options.micro_batches
    order = order_packs(seconds, features, *shape, seed, options.seconds, together)
    packs, kin, seconds = packs.reordered(order), kin[order], seconds[order]
    whole = len(packs) // options.global_batch * options.global_batch
    run = _exchanged(corpus, packs.part(0, whole), deviations, options, costs, seed, kin[:whole], seconds[:whole])
    return Packs.concatenate([run, packs.part(whole, len(packs))])


def _exchanged(
    corpus: Corpus,
    packs: Packs,
    deviations: Floats,
    options: PackOptions,
    costs: PackCosts,
    seed: int,
    kin: Ints,
    seconds: Floats,
) -> Packs:
    """Let samples of packs, which fill iterations as they stand, change places; `seconds` [P, parts] are the packs'."""
    ids = packs.sample_ids
    if not worth_exchanging(len(ids), options.seconds):
        return packs
    alone = Packs(np.arange(len(ids) + 1), ids)
    each = pack_features(corpus, alone, pack_loads(alone, corpus.sizes), (*LOADS, *corpus.sizes.more))
    deviations = deviations[: each.values.shape[1]]
    features = np.ascontiguousarray(each.values[:, deviations > 0] / deviations[deviations > 0])
    columns, budgets = _budgeted(corpus.sizes, options)
    samples = Samples(columns[ids], costs.of_samples(corpus.sizes, options.one_sum)[ids], features, each.has)
    dealt = deal(np.arange(len(packs)).reshape(-1, options.global_batch), options.data_parallel_size)
    return exchange_samples(packs, samples, budgets, seconds, kin, dealt, WAIT_TO_SPEND, seed, options.seconds)


def _budgeted(sizes: Sizes, options: PackOptions) -> tuple[Ints, Ints]:
    """Return the sizes of samples that have a budget, [N, K], and the budgets [K]."""
    limits = {name: budget for name, budget in options.budgets.items() if budget}
    columns = [sizes.tiles.astype(np.int64), sizes.tokens, *(sizes.more[name] for name in limits)]
    return np.column_stack(columns), np.array([options.vit_budget, options.llm_budget, *limits.values()])


def _pack_part(
    corpus: Corpus, samples: Ints, reasons: NDArray[np.int8], options: PackOptions, costs: PackCosts, seed: int
) -> tuple[Packs, Packs, Ints]:
    """Pack samples; oversize ones get packs of their own. Return the packs, those that were found, and the kin [P]."""
    oversize = samples[reasons[samples] > 0] if reasons.any() else samples[:0]
    if len(oversize):
        samples = samples[reasons[samples] == 0]
    parts, found = [], []
    for members in _members(corpus, samples):
        sizes = corpus.sizes if len(members) == len(corpus.sizes) else corpus.sizes.take(members)  # none twice
        plain = pack(sizes, options, seed)
        packs = even(plain, sizes, options, costs, seed) if options.method == "balanced" else plain
        parts.append(Packs(packs.pack_offsets, members[packs.sample_ids]))
        found.append(parts[-1] if packs is plain else Packs(plain.pack_offsets, members[plain.sample_ids]))
    if len(oversize):
        parts.append(Packs(np.arange(len(oversize) + 1), oversize))
        found.append(parts[-1])
    kin = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return Packs.concatenate(parts), Packs.concatenate(found), kin


def _members(corpus: Corpus, samples: Ints) -> Iterator[Ints]:
    """Yield samples that may share packs: of one group, and no copies of each other."""
    if len(samples) == 0:
        return
    if corpus.groups is None and (samples[1:] > samples[:-1]).all():  # no copies
        yield samples
        return
    copy = np.arange(len(samples)) - np.searchsorted(samples, samples)
    apart = copy if corpus.groups is None else corpus.groups[samples] * (int(copy.max()) + 1) + copy
    order = np.argsort(apart, kind="stable")
    borders = np.flatnonzero(np.diff(apart[order])) + 1
    yield from np.split(samples[order], borders)


def _level(packs: Packs, sizes: Sizes, options: PackOptions, costs: PackCosts) -> Packs:
    """Return packs so that those which fill iterations, as they stand, keep ranks level."""
    whole = np.arange(len(packs) // options.global_batch * options.global_batch).reshape(-1, options.global_batch)
    seconds = costs.waited_for(pack_loads(packs, sizes), (*LOADS, *sizes.more), options.one_sum)
    order = stored_order(deal_level(seconds, whole, options.data_parallel_size)).ravel()
    return packs.reordered(np.concatenate([order, np.arange(len(order), len(packs))]))


def _holds(packs: Packs, others: Packs) -> NDArray[np.bool_] | None:
    """Return which packs hold a sample of some others, if there are others."""
    if len(others) == 0:
        return None
    return np.logical_or.reduceat(np.isin(packs.sample_ids, others.sample_ids), packs.pack_offsets[:-1])


def baseline_order(packs: int, options: PackOptions, seed: int) -> Ints:
    """Return packs in the order in which a baseline runs them: iterations at random, or packs."""
    generator = np.random.default_rng((seed, 1))
    if options.method in ("isf", "random"):
        return generator.permutation(packs)
    whole = packs // options.global_batch * options.global_batch
    groups = np.arange(whole).reshape(-1, options.global_batch)
    return np.concatenate([generator.permutation(groups).ravel(), np.arange(whole, packs)])
