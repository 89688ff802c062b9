"""All rows of the end-to-end benchmark train on the same samples, each once, within the budgets."""

from itertools import chain

import pytest

from benchmarks.end_to_end import LLM_BUDGET, VIT_BUDGET, corpus, pack
from omnibal_ext.packing.costs import PackCosts


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("packing", ["random", "isf", "balanced"])
def test_every_sample_is_trained_on_once(packing: str, replicas: int) -> None:
    sizes = corpus(90, seed=1)
    work = pack(sizes, packing, replicas, PackCosts.of_model(), iterations=2)
    packs = list(chain.from_iterable(work.iterations))
    assert all(len(iteration) == work.microbatches * replicas for iteration in work.iterations)
    assert sum(tiles for tiles, _ in packs) == sizes.tiles.sum()
    real = [lengths for _, lengths in packs if lengths != (1,)]
    assert sum(map(len, real)) == len(sizes)
    held = [sample for contents in work.contents for samples in contents for sample in samples]
    assert sorted(held) == list(zip(range(len(sizes)), sizes.tiles.tolist(), sizes.tokens.tolist(), strict=True))
    for (tiles, lengths), samples in zip(packs, chain.from_iterable(work.contents), strict=True):
        assert tiles == sum(tiles for _, tiles, _ in samples)
        assert all(tokens <= length for (_, _, tokens), length in zip(samples, lengths, strict=False))
    if packing == "random":
        assert all(len(set(lengths)) == 1 for lengths in real)  # padded
    else:
        assert sorted(chain.from_iterable(real)) == sorted(sizes.tokens.tolist())
        assert all(tiles <= VIT_BUDGET and sum(lengths) <= LLM_BUDGET for tiles, lengths in packs)
    planned = work.sizes(replicas)
    assert planned.tiles.shape == (len(work.iterations), replicas, work.microbatches)
    # The ranks take every other pack: what the planner sees of a rank is what it runs.
    first = work.iterations[0][1::2] if replicas == 2 else work.iterations[0]
    assert planned.tokens[0, replicas - 1].tolist() == [sum(lengths) for _, lengths in first]


def test_text_packs_have_as_many_tokens() -> None:
    work = pack(corpus(60, seed=2), "balanced", 1, PackCosts.of_model(), iterations=1)
    text = work.without_images()
    assert [lengths for _, lengths in text.iterations[0]] == [lengths for _, lengths in work.iterations[0]]
    assert not any(tiles for tiles, _ in text.iterations[0])
