"""Pack one epoch of a corpus and order its packs."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Ints
from omnibal_ext.errors import UserError
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.epoch_order import opened_groups
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.balance_ranks import balance_iterations, place_opened, stored_order
from omnibal_ext.packing.ordering.metrics import lower_bound_packs
from omnibal_ext.packing.ordering.order_packs import MANY, order_packs
from omnibal_ext.packing.packers.balanced import pack_balanced
from omnibal_ext.packing.packers.baselines import pack_device_group, pack_length_group, pack_random
from omnibal_ext.packing.packers.isf import pack_isf
from omnibal_ext.packing.packs import LOADS, PackList, pack_loads
from omnibal_ext.packing.twins import distributed, twins_of
from omnibal_ext.packing.wide_epoch import narrow_iterations, pack_wide
from omnibal_ext.sizes import Sizes

Pack = Callable[[Sizes, PackOptions, int], PackList]
"""(sizes of samples that fit the budgets, options, seed) -> their packs."""


class Epoch(NamedTuple):
    """The packs of an epoch in running order; `groups` counts the iterations of each sub-epoch."""

    packs: PackList
    loads: Ints
    groups: list[int]
    widths: Ints | None = None
    """[P]; with `slots` [I, D, M] only if packs may be wide; each sub-epoch then fills complete iterations."""
    slots: Ints | None = None


def pack(sizes: Sizes, options: PackOptions, seed: int) -> PackList:
    """Pack samples that all fit the budgets, by the method of `options`."""
    packers: dict[str, Callable[[], PackList]] = {
        "balanced": lambda: pack_balanced(sizes, options.vit_budget, options.llm_budget, options.budgets, seed=seed),
        "isf": lambda: pack_isf(sizes, options.vit_budget, options.llm_budget, options.budgets, seed=seed),
        "random": lambda: pack_random(sizes, options.samples_per_pack, seed),
        "length_group": lambda: pack_length_group(sizes, options.samples_per_pack, seed),
        "device_group": lambda: pack_device_group(
            sizes, options.samples_per_pack, options.data_parallel_size, options.micro_batches, seed
        ),
    }
    return packers[options.method]()


def pack_epoch(
    corpus: Corpus, reasons: NDArray[np.int8], options: PackOptions, costs: PackCosts, epoch: int, make: Pack = pack
) -> Epoch:
    """Pack one epoch by `make`, and order its packs by iteration.

    1. Take the samples of each sub-epoch; those with `reasons` above 0 are left out or get packs of their own.
    2. Pack each exchange group of each sub-epoch separately.
    3. Equalize and order the packs of each sub-epoch; all leftover packs come last. Where it has many times `MANY`
       packs, do 2 and 3 for the longest of as many twins, and deal the other samples out alike.

    Raises:
        UserError: the weights leave no sample.
    """
    seed = options.seed + epoch
    packed = reasons == 0 if options.oversize == "reject" else np.ones(len(reasons), np.bool_)
    packed = packed if corpus.kept is None else packed & corpus.kept
    most_sub_epochs = max(1, int(corpus.sizes.tokens.sum()) // (options.llm_budget * options.global_batch))
    parts = [samples for samples in corpus.epoch_samples(epoch, options.seed, packed, most_sub_epochs) if len(samples)]
    if not parts:
        raise UserError(f"epoch {epoch} has no samples: raise --weights, or pack more input files")
    if options.wide:
        return _pack_wide(corpus, parts, replace(options, narrow_first=0) if epoch else options, costs, seed)
    ordered_packs, groups, leftover = [], [], PackList.concatenate([])
    for samples in parts:
        if options.method == "balanced":
            part = _pack_twins(corpus, samples, reasons, options, costs, seed, leftover, make)
        else:
            part, _ = _pack_sub_epoch(corpus, samples, reasons, options, seed, make)
            part = part.reordered(baseline_order(len(part), options, seed))
        groups.append(len(part) // options.global_batch)
        complete = groups[-1] * options.global_batch
        ordered_packs.append(part.between(0, complete))
        leftover = PackList.concatenate([leftover, part.between(complete, len(part))])
    if options.method == "balanced":
        leftover = _balance_leftover(leftover, corpus.sizes, options, costs)
    packs = PackList.concatenate([*ordered_packs, leftover])
    loads = pack_loads(packs, corpus.sizes, options.pad)
    if options.method == "balanced" and options.micro_batches == 1 and len(groups) == 1 and groups[0] > 1:
        seconds = costs.waited_for(loads, (*LOADS, *corpus.sizes.more), options.one_sum)
        order = place_opened(seconds, options.global_batch, opened_groups(options.seed, epoch, groups[0]))
        packs, loads = packs.reordered(order), loads[order]
    return Epoch(packs, loads, groups)


def _pack_twins(
    corpus: Corpus,
    samples: Ints,
    reasons: NDArray[np.int8],
    options: PackOptions,
    costs: PackCosts,
    seed: int,
    others: PackList,
    make: Pack,
) -> PackList:
    """Pack and order the samples of a sub-epoch: one of each set of twins for all of them, then what is left."""

    def ordered(packs: PackList, groups: Ints | None = None) -> PackList:
        return order_packs(corpus, packs, options, costs, seed, groups, others)

    alone = reasons.any() or not (samples[1:] > samples[:-1]).all()  # packs of their own, or copies
    sizes = corpus.sizes if len(samples) == len(corpus.sizes) else corpus.sizes.take(samples)
    count = 1 if alone else lower_bound_packs(sizes, options.all_budgets) // MANY
    twins, rest = twins_of(corpus, samples, count, seed)
    if twins.size == 0:
        return ordered(*_pack_sub_epoch(corpus, samples, reasons, options, seed, make))
    first = ordered(*_pack_sub_epoch(corpus, twins[0], reasons, options, seed, make))
    complete = max(0, len(first) // options.global_batch - 1) * options.global_batch  # some packs more to mix with
    copies = distributed(first, twins)
    left = np.sort(np.concatenate([rest, *(copy.between(complete, len(first)).sample_ids for copy in copies)]))
    last = ordered(*_pack_sub_epoch(corpus, left, reasons, options, seed, make))
    packs = PackList.concatenate([*(copy.between(0, complete) for copy in copies), last])
    whole = len(packs) // options.global_batch * options.global_batch
    groups = np.random.default_rng((seed, 6)).permutation(np.arange(whole).reshape(-1, options.global_batch))
    return packs.reordered(np.concatenate([groups.ravel(), np.arange(whole, len(packs))]))


def _pack_wide(corpus: Corpus, parts: list[Ints], options: PackOptions, costs: PackCosts, seed: int) -> Epoch:
    """Pack sub-epochs with packs of several widths and assign slots; narrow iterations, if any, come first."""
    scheduled = []
    if options.narrow_first:
        narrow, parts[0] = narrow_iterations(corpus, parts[0], partial(_exchange_groups, corpus), options, costs, seed)
        scheduled = [narrow]
    scheduled += [pack_wide(corpus, list(_exchange_groups(corpus, samples)), options, costs, seed) for samples in parts]
    first = np.cumsum([0, *(len(part.packs) for part in scheduled)])
    slots = [np.where(part.slots >= 0, part.slots + n, part.slots) for part, n in zip(scheduled, first, strict=False)]
    packs = PackList.concatenate([part.packs for part in scheduled])
    widths = np.concatenate([part.widths for part in scheduled])
    groups = [len(part.slots) for part in scheduled]
    if options.narrow_first:  # later epochs shuffle them among the others
        groups[:2] = [sum(groups[:2])]
    return Epoch(packs, pack_loads(packs, corpus.sizes), groups, widths, np.concatenate(slots))


def _pack_sub_epoch(
    corpus: Corpus, samples: Ints, reasons: NDArray[np.int8], options: PackOptions, seed: int, make: Pack
) -> tuple[PackList, Ints]:
    """Pack samples; oversize ones get packs of their own. Return the packs and the exchange group of each, [P]."""
    oversize = samples[reasons[samples] > 0] if reasons.any() else samples[:0]
    if len(oversize):
        samples = samples[reasons[samples] == 0]
    parts = []
    for group in _exchange_groups(corpus, samples):
        sizes = corpus.sizes if len(group) == len(corpus.sizes) else corpus.sizes.take(group)  # none twice
        packs = make(sizes, options, seed)
        parts.append(PackList(packs.pack_offsets, group[packs.sample_ids]))
    if len(oversize):
        parts.append(PackList(np.arange(len(oversize) + 1), oversize))
    return PackList.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])


def _exchange_groups(corpus: Corpus, samples: Ints) -> Iterator[Ints]:
    """Yield exchange groups: samples of one corpus group that may share packs, none twice."""
    if len(samples) == 0:
        return
    if corpus.groups is None and (samples[1:] > samples[:-1]).all():  # no copies
        yield samples
        return
    copy = np.arange(len(samples)) - np.searchsorted(samples, samples)
    keys = copy if corpus.groups is None else corpus.groups[samples] * (int(copy.max()) + 1) + copy
    order = np.argsort(keys, kind="stable")
    borders = np.flatnonzero(np.diff(keys[order])) + 1
    yield from np.split(samples[order], borders)


def _balance_leftover(packs: PackList, sizes: Sizes, options: PackOptions, costs: PackCosts) -> PackList:
    """Reorder leftover packs so that iterations which they fill completely are balanced over ranks."""
    complete = np.arange(len(packs) // options.global_batch * options.global_batch).reshape(-1, options.global_batch)
    seconds = costs.waited_for(pack_loads(packs, sizes), (*LOADS, *sizes.more), options.one_sum)
    order = stored_order(balance_iterations(seconds, complete, options.data_parallel_size)).ravel()
    return packs.reordered(np.concatenate([order, np.arange(len(order), len(packs))]))


def baseline_order(packs: int, options: PackOptions, seed: int) -> Ints:
    """Return the running order of a baseline's packs: random packs, or random iterations."""
    generator = np.random.default_rng((seed, 1))
    if options.method in ("isf", "random"):
        return generator.permutation(packs)
    complete = packs // options.global_batch * options.global_batch
    groups = np.arange(complete).reshape(-1, options.global_batch)
    return np.concatenate([generator.permutation(groups).ravel(), np.arange(complete, packs)])
