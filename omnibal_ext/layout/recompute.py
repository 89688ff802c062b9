"""Choice of the layers to recompute: the paper's rule, the fewest that fit (OmniBal, section 4.3), with the true bytes.

On 1F1B's stage s a kept layer costs its bytes min(P - s, M) times, once for each microbatch in flight; other schedules
and chunks have other counts, which `LayoutProblem.rank_bytes` knows.
"""

from collections.abc import Iterator
from itertools import pairwise, product

import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.chain import RECOMPUTABLE_KINDS
from omnibal_ext.errors import UserError
from omnibal_ext.layout.problem import Edges, Layout, LayoutProblem
from omnibal_ext.units import in_bytes


def recompute_all(problem: LayoutProblem, edges: Edges) -> Layout:
    """Return the layout with all encoder and LLM layers recomputed. Raises UserError where even that does not fit."""
    layout = _everything(problem, edges)
    _refuse_misfits(problem, layout)
    return layout


def fewest_that_fit(problem: LayoutProblem, edges: Edges) -> Layout:
    """Return the layout with the fewest recomputed layers on every rank. Raises UserError if a rank cannot fit.

    On each rank, one number of ViT, of LLM and of audio layers for each of its stages:
    1. Try nothing recomputed, then one layer, then two, ...; of equal totals first what saves most bytes. (With several
       chunks there are too many combinations: there each further layer is the one that saves most bytes in flight.)
    2. Take the first that fits.
    """
    held, everything = problem.counts(_everything(problem, edges))
    recomputed = np.zeros_like(everything)
    for rank, mine in enumerate(problem.placement.stages_of):
        candidates = _counts_of_one_stage if problem.chunks == 1 else _counts_of_many_stages
        for counts in candidates(problem, rank, everything[mine]):
            if problem.rank_bytes(rank, held[mine], counts) <= problem.memory_bytes:
                recomputed[mine] = counts
                break
        else:
            _refuse_misfits(problem, _everything(problem, edges))
    return problem.layout(edges, recomputed)


def _counts_of_one_stage(problem: LayoutProblem, rank: int, most: Ints) -> Iterator[Ints]:
    """Yield how many layers of each kind to recompute whole, each combination up to `most`: int64 [1, options].

    Fewest layers in total first; of equal totals, first what saves most bytes.
    """
    options = np.flatnonzero(problem.columns.whole)
    saved = problem.tables.saved[options].tolist()
    numbers = product(*(range(count + 1) for count in most[0, options].tolist()))
    for values in sorted(numbers, key=lambda n: (sum(n), -sum(a * b for a, b in zip(n, saved, strict=True)))):
        counts = np.zeros_like(most)
        counts[0, options] = values
        yield counts


def _counts_of_many_stages(problem: LayoutProblem, rank: int, most: Ints) -> Iterator[Ints]:
    """Yield recompute counts int64 [chunks, options], one layer more each time: the one that saves most in flight."""
    counts = np.zeros_like(most)
    in_flight = problem.held[rank].max(axis=0)
    order = sorted(
        ((chunk, kind) for chunk in range(problem.chunks) for kind in np.flatnonzero(problem.columns.whole)),
        key=lambda one: -in_flight[one[0]] * problem.tables.saved[one[1]],
    )
    yield counts.copy()
    for chunk, kind in order:
        for _ in range(most[chunk, kind]):
            counts[chunk, kind] += 1
            yield counts.copy()


def _everything(problem: LayoutProblem, edges: Edges) -> Layout:
    chain = problem.profile.chain
    ids = [tuple(i for i in range(first, end) if chain[i] in RECOMPUTABLE_KINDS) for first, end in pairwise(edges)]
    return Layout(edges, tuple(ids))


def _refuse_misfits(problem: LayoutProblem, layout: Layout) -> None:
    """Raise UserError, with what would help, if a layout with all layers recomputed exceeds a rank's memory."""
    short = [peak - problem.memory_bytes for peak in problem.stage_peak_bytes(layout)]
    rank = int(np.argmax(short))
    if short[rank] <= 0:
        return
    held, _ = problem.counts(layout)
    weights = float((held[problem.placement.stages_of[rank]] @ problem.tables.fixed).sum())
    remedy = "more tensor or pipeline ranks, smaller budgets, or fewer microbatches in flight would help"
    if weights > problem.memory_bytes:
        remedy = "weights alone are over it: more tensor or pipeline ranks would help"
        profile = problem.profile
        if not {**profile.notes, **profile.measured_with}.get("distributed_optimizer"):
            remedy += ", or a profile with --use-distributed-optimizer"
    needed, limit = short[rank] + problem.memory_bytes, problem.memory_bytes
    raise UserError(
        f"pipeline rank {rank} needs {in_bytes(needed)} with all layers recomputed ({in_bytes(weights)} for weights), "
        f"{short[rank]:.0f} bytes ({in_bytes(short[rank])}) over the limit of {in_bytes(limit)}; {remedy}"
    )
