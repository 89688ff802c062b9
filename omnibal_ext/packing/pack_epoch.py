"""One epoch of a corpus: its samples as packs, in the order in which they run."""

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
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.deal_to_ranks import deal_level, stored_order
from omnibal_ext.packing.ordering.pipeline import ordered
from omnibal_ext.packing.packers.balanced import pack_balanced
from omnibal_ext.packing.packers.baselines import pack_device_group, pack_length_group, pack_random
from omnibal_ext.packing.packers.isf import pack_isf
from omnibal_ext.packing.packs import LOADS, Packs, pack_loads
from omnibal_ext.packing.wide_epoch import narrow_iterations, seat_part
from omnibal_ext.sizes import Sizes


class Epoch(NamedTuple):
    """Packs in the order in which they run, what each costs, how many groups of one global batch a part has.

    And the packs as they were found, before any of their samples changed places.
    """

    packs: Packs
    loads: Ints
    groups: list[int]
    found: Packs
    widths: Ints | None = None
    """[P]; with `seats` [I, D, M] only where packs may be wider than a rank. Then each part fills whole iterations."""
    seats: Ints | None = None


def pack_epoch(corpus: Corpus, reasons: NDArray[np.int8], options: PackOptions, costs: PackCosts, epoch: int) -> Epoch:
    """Pack one epoch and order its packs by iteration.

    1. Take each part's samples; those that `reasons` is above 0 for are left out, or set apart.
    2. Pack each part, and in it each group of samples that may share packs, for itself.
    3. Let the packs of each part cost the same, and order them; those that fill no iteration come behind all parts.

    Raises:
        UserError: the weights leave no sample.
    """
    seed = options.seed + epoch
    packed = reasons == 0 if options.oversize == "reject" else np.ones(len(reasons), np.bool_)
    packed = packed if corpus.kept is None else packed & corpus.kept
    most_parts = max(1, int(corpus.sizes.tokens.sum()) // (options.llm_budget * options.global_batch))
    parts = [samples for samples in corpus.epoch_samples(epoch, options.seed, packed, most_parts) if len(samples)]
    if not parts:
        raise UserError(f"epoch {epoch} has no samples: raise --weights, or pack more input files")
    if options.wide:
        return _pack_wide(corpus, parts, replace(options, narrow_first=0) if epoch else options, costs, seed)
    done, groups, as_found, rest = [], [], [], Packs.concatenate([])
    for samples in parts:
        part, kin = _pack_part(corpus, samples, reasons, options, seed)
        as_found.append(part)
        if options.method == "balanced":
            part = ordered(corpus, part, options, costs, seed, kin, rest)
        else:
            part = part.reordered(baseline_order(len(part), options, seed))
        groups.append(len(part) // options.global_batch)
        whole = groups[-1] * options.global_batch
        done.append(part.part(0, whole))
        rest = Packs.concatenate([rest, part.part(whole, len(part))])
    if options.method == "balanced":
        rest = _level(rest, corpus.sizes, options, costs)
    packs = Packs.concatenate([*done, rest])
    return Epoch(packs, pack_loads(packs, corpus.sizes, options.pad), groups, Packs.concatenate(as_found))


def _pack_wide(corpus: Corpus, parts: list[Ints], options: PackOptions, costs: PackCosts, seed: int) -> Epoch:
    """Pack parts with packs of several widths, and seat them; of the first part narrow iterations first."""
    seated = []
    if options.narrow_first:
        narrow, parts[0] = narrow_iterations(corpus, parts[0], partial(_members, corpus), options, costs, seed)
        seated = [narrow]
    seated += [seat_part(corpus, list(_members(corpus, samples)), options, costs, seed) for samples in parts]
    first = np.cumsum([0, *(len(part.packs) for part in seated)])
    seats = [np.where(part.seats >= 0, part.seats + n, part.seats) for part, n in zip(seated, first, strict=False)]
    packs = Packs.concatenate([part.packs for part in seated])
    widths = np.concatenate([part.widths for part in seated])
    groups = [len(part.seats) for part in seated]
    if options.narrow_first:  # in later epochs they are shuffled among the others
        groups[:2] = [sum(groups[:2])]
    return Epoch(packs, pack_loads(packs, corpus.sizes), groups, packs, widths, np.concatenate(seats))


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


def _pack_part(
    corpus: Corpus, samples: Ints, reasons: NDArray[np.int8], options: PackOptions, seed: int
) -> tuple[Packs, Ints]:
    """Pack samples; oversize ones get packs of their own. Return the packs and their kin [P]."""
    oversize = samples[reasons[samples] > 0] if reasons.any() else samples[:0]
    if len(oversize):
        samples = samples[reasons[samples] == 0]
    parts = []
    for members in _members(corpus, samples):
        sizes = corpus.sizes if len(members) == len(corpus.sizes) else corpus.sizes.take(members)  # none twice
        packs = pack(sizes, options, seed)
        parts.append(Packs(packs.pack_offsets, members[packs.sample_ids]))
    if len(oversize):
        parts.append(Packs(np.arange(len(oversize) + 1), oversize))
    return Packs.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])


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


def baseline_order(packs: int, options: PackOptions, seed: int) -> Ints:
    """Return packs in the order in which a baseline runs them: iterations at random, or packs."""
    generator = np.random.default_rng((seed, 1))
    if options.method in ("isf", "random"):
        return generator.permutation(packs)
    whole = packs // options.global_batch * options.global_batch
    groups = np.arange(whole).reshape(-1, options.global_batch)
    return np.concatenate([generator.permutation(groups).ravel(), np.arange(whole, packs)])
