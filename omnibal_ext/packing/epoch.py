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
from omnibal_ext.packing.deal import deal_level, stored_order
from omnibal_ext.packing.even import even_packs, worth_evening
from omnibal_ext.packing.isf import pack_isf
from omnibal_ext.packing.level import order_packs
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.packs import LOADS, Packs, pack_loads
from omnibal_ext.packing.teach import pack_features
from omnibal_ext.sizes import Sizes

Ints = NDArray[np.int64]


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

    Raises:
        UserError: the weights leave no sample.
    """
    seed = options.seed + epoch
    packed = reasons == 0 if options.oversize == "reject" else np.ones(len(reasons), np.bool_)
    most_parts = max(1, int(corpus.sizes.tokens.sum()) // (options.llm_budget * options.global_batch))
    parts = [samples for samples in corpus.epoch_samples(epoch, options.seed, packed, most_parts) if len(samples)]
    if not parts:
        raise UserError(f"epoch {epoch} has no samples: raise --weights, or pack more input files")
    done = [_pack_part(corpus, samples, reasons, options, costs, seed) for samples in parts]
    packs = Packs.concatenate(done)
    loads = pack_loads(packs, corpus.sizes, options.pad)
    order, groups = _ordered(corpus, done, packs, loads, options, costs, seed)
    return Epoch(packs.reordered(order), loads[order], groups)


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
    limits = {name: budget for name, budget in options.budgets.items() if budget}
    columns = [sizes.tiles.astype(np.int64), sizes.tokens, *(sizes.more[name] for name in limits)]
    budgets = np.array([options.vit_budget, options.llm_budget, *limits.values()])
    seconds = costs.of_samples(sizes, options.one_sum)
    return even_packs(packs, np.column_stack(columns), budgets, seconds, options.micro_batches, seed, options.seconds)


def _pack_part(
    corpus: Corpus, samples: Ints, reasons: NDArray[np.int8], options: PackOptions, costs: PackCosts, seed: int
) -> Packs:
    """Pack samples of a corpus, evenly; oversize ones get packs of their own."""
    oversize = samples[reasons[samples] > 0] if reasons.any() else samples[:0]
    if len(oversize):
        samples = samples[reasons[samples] == 0]
    parts = []
    for members in _members(corpus, samples):
        sizes = corpus.sizes if len(members) == len(corpus.sizes) else corpus.sizes.take(members)  # none twice
        packs = pack(sizes, options, seed)
        if options.method == "balanced":
            packs = even(packs, sizes, options, costs, seed)
        parts.append(Packs(packs.pack_offsets, members[packs.sample_ids]))
    if len(oversize):
        parts.append(Packs(np.arange(len(oversize) + 1), oversize))
    return parts[0] if len(parts) == 1 else Packs.concatenate(parts)


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


def _ordered(
    corpus: Corpus, parts: list[Packs], packs: Packs, loads: Ints, options: PackOptions, costs: PackCosts, seed: int
) -> tuple[Ints, list[int]]:
    """Return the packs of an epoch in the order in which they run, and how many groups each part has."""
    batch = options.global_batch
    names = (*LOADS, *corpus.sizes.more)
    seconds = costs.waited_for(loads, names, options.one_sum)
    features = pack_features(corpus, packs, loads, names).scaled() if options.method == "balanced" else None
    first, ordered, rest, groups = 0, [], np.zeros(0, np.int64), []
    for part in parts:
        own = np.arange(first, first + len(part))
        if features is not None:
            again = _holds(part, packs, rest)
            order = order_packs(
                seconds[own],
                features[own],
                options.data_parallel_size,
                options.micro_batches,
                seed,
                options.seconds,
                again,
            )
        else:
            order = baseline_order(len(part), options, seed)
        groups.append(len(part) // batch)
        ordered.append(own[order[: groups[-1] * batch]])
        rest = np.concatenate([rest, own[order[groups[-1] * batch :]]])
        first += len(part)
    more = rest[: len(rest) // batch * batch].reshape(-1, batch)
    if options.method == "balanced":
        more = stored_order(deal_level(seconds, more, options.data_parallel_size))
    return np.concatenate([*ordered, more.ravel(), rest[more.size :]]), groups


def _holds(part: Packs, packs: Packs, chosen: Ints) -> NDArray[np.bool_] | None:
    """Return which packs of a part hold a sample of the `chosen` packs, if any are chosen."""
    if len(chosen) == 0:
        return None
    taken = packs.reordered(chosen).sample_ids
    return np.logical_or.reduceat(np.isin(part.sample_ids, taken), part.pack_offsets[:-1])


def baseline_order(packs: int, options: PackOptions, seed: int) -> Ints:
    """Return packs in the order in which a baseline runs them: iterations at random, or packs."""
    generator = np.random.default_rng((seed, 1))
    if options.method in ("isf", "random"):
        return generator.permutation(packs)
    whole = packs // options.global_batch * options.global_batch
    groups = np.arange(whole).reshape(-1, options.global_batch)
    return np.concatenate([generator.permutation(groups).ravel(), np.arange(whole, packs)])
