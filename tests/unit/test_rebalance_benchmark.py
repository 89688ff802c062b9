"""OrchMLLM's setting, simulated on fewer GPUs: figures of batches as read from raw sizes, and the order of the ways."""

import numpy as np
import pytest

from benchmarks.rebalance import A_RANK, H100, MODEL, STEPS_PLACED, orchmllm, three_modalities
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.operations import ModelOperations

GPUS = 64


def test_batches_as_read_wait_in_each_phase_for_the_fullest_gpu() -> None:
    """All layers run their forward again; the head and what embeds do not."""
    found, sizes = orchmllm(GPUS, 0.05), three_modalities(6 * GPUS * A_RANK)
    profile = analytic_profile(MODEL, "h100", {"tiles": 24, "tokens": 8192, "frames": 12_000}, 1, GPUS)
    frames, tokens, tiles = sizes.more["frames"], sizes.tokens, sizes.tiles
    loads, seconds = {"frames": frames / 12_000, "tiles": tiles / 24}, 0.0
    samples = STEPS_PLACED * GPUS * A_RANK

    def of_ranks(values: np.ndarray) -> np.ndarray:
        return values[:samples].reshape(STEPS_PLACED, GPUS, A_RANK).sum(axis=2)

    for unit, kinds in (("frames", ("audio_embed", "audio", "audio_projector")),
                        ("tiles", ("patch_embed", "vit", "projector"))):  # fmt: skip
        for kind in kinds:
            cost, times = profile.layers[kind], profile.chain.count(kind)
            once = cost.forward_seconds * (2 if kind in ("audio", "vit") else 1) + cost.backward_seconds
            seconds += times * once * of_ranks(loads[unit]).max(axis=1).sum()
    language = np.zeros((STEPS_PLACED, GPUS))
    for kind in ("word_embed", "llm", "head"):
        cost, times = profile.layers[kind], profile.chain.count(kind)
        for fit, full, runs in ((cost.forward_fit, cost.forward_seconds, 2 if kind == "llm" else 1),
                                (cost.backward_fit, cost.backward_seconds, 1)):  # fmt: skip
            _, linear, squares = fit or (0.0, full / 8192, 0.0)
            language += times * runs * (linear * of_ranks(tokens) + squares * of_ranks(tokens**2))
    seconds += language.max(axis=1).sum()
    sums = {"tiles": float(tiles.sum()), "tokens": float(tokens.sum()), "frames": float(frames.sum())}
    needed = ModelOperations.of(MODEL).total(sums, float((tokens**2).sum()), sums["tokens"]) / len(sizes) / H100.flops
    assert found["sharded, as read"] == pytest.approx(needed / (seconds / STEPS_PLACED / A_RANK))
    megatron, read, balanced, packed, planned = found.values()
    assert megatron < read < balanced < 0.6
    assert 2 * megatron < planned < 0.6
    assert 2 * read < packed < 0.6
