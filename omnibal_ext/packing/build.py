"""Packs a corpus to a packed index, in one call: the work of `omnibal pack`."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numba.core.event import TimingListener, install_listener
from numpy.typing import NDArray

from omnibal_ext.errors import UserError
from omnibal_ext.files.locks import working_on
from omnibal_ext.large_arrays import pieces
from omnibal_ext.modalities.modality import FURTHER, LANGUAGE, VISION
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.packed_index import PackedIndex, WidePackArrays, refuse_other, write_index
from omnibal_ext.packing.index.summary import Summary, reject_names, summarise
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.pack_epoch import Epoch, pack_epoch
from omnibal_ext.packing.packs import LOADS, TILES, TOKENS, LoadedPacks
from omnibal_ext.packing.shard_loads import shard_loads
from omnibal_ext.packing.widths import sample_widths
from omnibal_ext.sizes import Sizes

Packer = Callable[[Corpus, NDArray[np.int8], PackOptions, PackCosts, int], Epoch]


def build_index(
    corpus: Corpus | Sizes,
    output_dir: str | Path,
    options: PackOptions,
    built_from: Mapping[str, Any] | None = None,
    costs: PackCosts | None = None,
    packer: Packer = pack_epoch,
) -> tuple[PackedIndex, Summary]:
    """Pack a corpus and write its packed index; return that, opened, and the measures of its first epoch.

    1. Leave out samples that fit no pack (or give each its own).
    2. For each epoch: take samples by weight, pack them, order the packs by iteration.
    3. Write the index, with a line for every sample left out.

    Args:
        built_from: what the corpus was read from, stored in the manifest.
        costs: seconds of packs; by default of a model with a large ViT and a large language model, for which a tile is
            no patch: give `PackCosts.of_model("qwen3-vl-8b")`, or of yours, where tiles are patches.
        packer: packs and orders an epoch, instead of `pack_epoch`.

    Raises:
        UserError: no sample fits the budgets, or `output_dir` holds something else.
    """
    with working_on(Path(output_dir)), _clock() as spent:
        return _build_index(corpus, output_dir, options, built_from, costs, packer, spent)


@contextmanager
def _clock() -> Iterator[Callable[[], tuple[float, float]]]:
    """Yield a function that returns (seconds so far without numba's compilation, seconds of compilation)."""
    begin, compiling = time.perf_counter(), TimingListener()

    def spent() -> tuple[float, float]:
        compiled = compiling.duration if compiling.done else 0.0
        return time.perf_counter() - begin - compiled, compiled

    with install_listener("numba:compile", compiling):
        yield spent


def _build_index(
    corpus: Corpus | Sizes,
    output_dir: str | Path,
    options: PackOptions,
    built_from: Mapping[str, Any] | None,
    costs: PackCosts | None,
    packer: Packer,
    spent: Callable[[], tuple[float, float]],
) -> tuple[PackedIndex, Summary]:
    corpus = Corpus.of(corpus) if isinstance(corpus, Sizes) else corpus
    corpus = replace(corpus, scratch=Path(output_dir).resolve().parent)
    costs = costs or PackCosts.asked_for(None, None, None, options.all_budgets)
    costs = costs.for_corpus(corpus.sizes)
    options = options if options.epochs else replace(options, epochs=corpus.epochs_to_see_all())
    options = _without_needless_widths(corpus.sizes, options)
    reasons = reject_reasons(corpus.sizes, options)
    count = len(reasons) if corpus.kept is None else int(np.count_nonzero(corpus.kept))
    reasons = reasons if corpus.kept is None else reasons * corpus.kept
    left_out = reasons if options.oversize == "reject" else np.zeros_like(reasons)
    if (rejected := int(np.count_nonzero(left_out))) == count:
        raise UserError(f"none of {count} samples fits {options.held}: raise the budgets")
    asked = {**asdict(options), "costs": costs.to_record(), "built_from": dict(built_from or {})}
    asked |= {"sample_vit_budget": options.vit_budget, "sample_llm_budget": options.llm_budget}
    del asked["vit_budget"], asked["llm_budget"]  # the manifest has those of the packs, set below
    asked["widths"] = list(options.widths)
    if not options.wide:
        del asked["widths"]
    if not (options.wide and options.narrow_first):
        del asked["narrow_first"]
    refuse_other(Path(output_dir), asked)
    epochs, epoch_packs, longest = list[Epoch](), list[int](), np.zeros(len(LOADS) + len(corpus.sizes.more), np.int64)

    def made() -> Iterator[LoadedPacks]:
        for number in range(options.epochs or 1):
            epochs.append(packer(corpus, reasons, options, costs, number))
            epoch_packs.append(0)
            for piece in epochs[-1].pieces:
                np.maximum(longest, piece.loads.max(axis=0, initial=0), out=longest)
                epoch_packs[-1] += len(piece.packs)
                yield piece

    def described() -> tuple[dict[str, Any], WidePackArrays | None]:
        slots = [epoch.slots.size for epoch in epochs if epoch.slots is not None]
        roomy = options.pad or options.oversize == "alone"  # packs may exceed the requested budgets
        manifest = {
            **asked,
            "vit_budget": int(longest[TILES]) if roomy else options.vit_budget,
            "llm_budget": int(longest[TOKENS]) if roomy else options.llm_budget,
            "global_batch": options.global_batch,
            "pad": options.pad,
            "one_sum": options.one_sum,
            "loads": [*LOADS, *corpus.sizes.more],
            "epoch_packs": epoch_packs,
            **({"epoch_seats": slots} if slots else {}),
            "epoch_parts": [epoch.groups for epoch in epochs],
            "rejected": rejected,
            "sources": [asdict(source) for source in corpus.sources],
        }
        return manifest, _wide_arrays(epochs, corpus)

    index = write_index(output_dir, made(), described, _rejects(corpus, left_out, options))
    return index, summarise(index, corpus, left_out, spent())


def _without_needless_widths(sizes: Sizes, options: PackOptions) -> PackOptions:
    """Return options of width 1 if each sample fits one rank: the index is then the same as without `--widths`."""
    needless = options.method == "balanced" and options.widths[0] == 1
    if options.wide and needless and (sample_widths(sizes, options, options.widths) == 1).all():
        return replace(options, widths=(1,))
    return options


def _wide_arrays(epochs: list[Epoch], corpus: Corpus) -> WidePackArrays | None:
    """Return the index's arrays of wide packs, packs numbered through all epochs; None where no pack may be wide."""
    widths, slots, loads, first = [], [], [], 0
    for epoch in epochs:
        if epoch.widths is None or epoch.slots is None:
            return None
        widths.append(epoch.widths)
        slots.append(np.where(epoch.slots >= 0, epoch.slots + first, epoch.slots).ravel())
        loads.append(shard_loads(epoch.packs, corpus.sizes, epoch.widths))
        first += len(epoch.packs)
    return WidePackArrays(np.concatenate(widths), np.concatenate(slots), np.concatenate(loads))


def reject_reasons(sizes: Sizes, options: PackOptions) -> NDArray[np.int8]:
    """Return for each sample 0 if a pack can hold it, else the number of its reason in `reject_names`: int8 [N]."""
    ranks = options.widths[-1]
    further = {name: budget for name, budget in options.budgets.items() if budget}
    limits = {VISION.size: options.vit_budget, LANGUAGE.size: options.llm_budget, **further}
    if all(sizes.most(name) <= ranks * budget for name, budget in limits.items()):
        return np.broadcast_to(np.int8(0), len(sizes))  # which takes no memory
    reasons = np.zeros(len(sizes), np.int8)
    for number, (name, budget) in enumerate(options.budgets.items(), 3):
        if budget:
            reasons[sizes.more[name] > ranks * budget] = number
    reasons[sizes.tokens > ranks * options.llm_budget] = 2
    reasons[sizes.tiles > ranks * options.vit_budget] = 1
    return reasons


def _rejects(corpus: Corpus, reasons: NDArray[np.int8], options: PackOptions) -> Iterator[dict[str, Any]]:
    """Yield a record for each sample left out: number, origin, sizes and reason."""
    names, ranks = reject_names(options.budgets), options.widths[-1]
    further = [(one, options.budgets[one.size]) for one in FURTHER if options.budgets.get(one.size)]
    together = f" on {ranks} ranks" if options.wide else ""
    left_out = (piece.start + np.flatnonzero(reasons[piece]) for piece in pieces(len(reasons)))
    for sample in chain.from_iterable(numbers.tolist() for numbers in left_out):
        tiles, tokens = int(corpus.sizes.tiles[sample]), int(corpus.sizes.tokens[sample])
        yield {
            "sample": sample,
            **corpus.origin_of(sample),
            "tiles": tiles,
            "tokens": tokens,
            **{name: int(values[sample]) for name, values in corpus.sizes.more.items()},
            "reason": names[int(reasons[sample])],
            "detail": f"{tiles} tiles of {ranks * options.vit_budget}, "
            f"{tokens} tokens of {ranks * options.llm_budget}{together}"
            + "".join(f", {corpus.sizes.more[one.size][sample]} {one.units} of {most}" for one, most in further),
        }
