"""Small layout problems for tests."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omnibal_ext.chain import KINDS, RECOMPUTABLE_KINDS
from omnibal_ext.costs.profile import LayerCost, PackSizes, Profile
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.modalities.modality import AUDIO, LANGUAGE, VISION
from tests.chains import layer_chain

FULL, LINEAR = "vit_full", "llm_linear"
FRAMES = 32
"""The budget of those that hear."""
LANGUAGE_LAYERS = [LINEAR, "llm.1", "llm.2"]
"""What layers that differ from the first of their kind stand under, in older profiles and in those of today."""


def make_profile(
    vit: int = 3, llm: int = 3, costs: dict[str, LayerCost] | None = None, parameters: dict[str, int] | None = None,
    audio: int | None = None,
) -> Profile:  # fmt: skip
    """ViT layers of 1 s and LLM layers of 2 s forward (backward twice that) unless told; the rest is light."""
    usual = {kind: LayerCost(0.1, 0.2, 1.0, 1.0, 10.0, 1.0) for kind in KINDS}
    usual["vit"] = LayerCost(1.0, 2.0, 8.0, 1.0, 10.0, 4.0)
    usual["llm"] = LayerCost(2.0, 4.0, 6.0, 2.0, 20.0, 2.0)
    return Profile(
        "tiny", "aa", layer_chain(vit, llm, audio), usual | (costs or {}),
        {"tiles": 4, "tokens": 128} | ({} if audio is None else {"frames": FRAMES}),
        parameters or dict.fromkeys(KINDS, 1),
    )  # fmt: skip


def _some_layers(chain: tuple[str, ...], seed: int) -> tuple[int, ...]:
    """ViT layers whose features enter the language model, no more than that has layers."""
    random, vit = np.random.default_rng((seed, 1)), chain.count("vit")
    most = min(vit, chain.count("llm"))
    return tuple(sorted(map(int, random.permutation(vit)[: int(random.integers(1, most + 1))])))


def random_problem(seed: int, hears: bool = False, **changes: Any) -> LayoutProblem:
    """A random chain, pipeline, memory and packs, small enough for brute force; memory often binds. `hears`: with an
    audio encoder in front."""
    random, of_audio = np.random.default_rng(seed), np.random.default_rng((seed, 3))
    costs = {}
    for kind in (*VISION.kinds, *LANGUAGE.kinds, *AUDIO.kinds):
        drawn = of_audio if kind in AUDIO.kinds else random
        forward, backward, kept, weight, output = drawn.uniform(0.05, 1.0, 5)
        heavy = 3.0 if kind in RECOMPUTABLE_KINDS else 0.5
        costs[kind] = LayerCost(
            heavy * forward, heavy * (forward + backward), heavy * kept, 0.2 * kept, weight, output,
            weight_gradient_seconds=heavy * backward / 2,
            late_bytes=heavy * kept * float(drawn.uniform(0.1, 1.2)) if seed % 2 else None,
        )  # fmt: skip
    if seed % 3:  # of some kind, or of both, a level that is cheap
        cheap = np.random.default_rng((seed, 2))
        for kind in (("vit",), ("llm",), ("vit", "llm"))[seed % 5 % 3] + (("audio",) if hears else ()):
            cost, share = costs[kind], float(cheap.uniform(0.02, 0.7))
            saved = float(cheap.uniform(0.1, 0.9)) * (cost.kept_bytes - cost.recompute_kept_bytes)
            costs[kind] = replace(
                cost, recompute_cheap_seconds=share * cost.forward_seconds,
                recompute_cheap_kept_bytes=cost.kept_bytes - saved,
            )  # fmt: skip
    layers_heard = int(of_audio.integers(1, 3)) if hears else None
    profile = make_profile(int(random.integers(1, 4)), int(random.integers(1, 4)), costs, audio=layers_heard)
    ranks, layers = int(random.integers(1, 4)), len(profile.chain)
    settings: dict[str, Any] = {
        "ranks": ranks, "microbatches": int(random.integers(1, 6)),
        "chunks": int(random.integers(1, 3)) if 2 * ranks <= min(layers, 4) else 1,
        "memory_bytes": float(layers / ranks * random.uniform(1.0, 8.0)), **changes,
    }  # fmt: skip
    profile = replace(profile, transfer_seconds_per_byte=float(random.choice([0.0, 0.3])))
    if seed % 4 == 3:
        profile = replace(profile, feature_layers=_some_layers(profile.chain, seed))
    if seed % 10 == 7:  # some ViT layers see whole images
        full = replace(costs["vit"], forward_seconds=2.5 * costs["vit"].forward_seconds)
        full = replace(full, backward_seconds=1.7 * full.backward_seconds)
        layers_of_costs = profile.layers | {FULL: full}
        profile = replace(profile, layers=layers_of_costs, layers_apart={FULL: _some_layers(profile.chain, seed)})
    if seed % 10 == 4:  # some language layers are of other kinds
        linear = replace(costs["llm"], forward_seconds=0.6 * costs["llm"].forward_seconds)
        linear = replace(linear, backward_seconds=0.8 * linear.backward_seconds, weight_bytes=1.1 * linear.weight_bytes)
        some = [layer for layer in range(profile.chain.count("llm")) if layer != seed % 3] or [0]
        kinds = {kind: tuple(some[number :: len(LANGUAGE_LAYERS)]) for number, kind in enumerate(LANGUAGE_LAYERS)}
        apart = {kind: layers for kind, layers in kinds.items() if layers}
        profile = replace(profile, layers=profile.layers | dict.fromkeys(apart, linear), layers_apart=apart)
    if random.random() < 0.5:
        shape = (int(random.integers(1, 3)), int(random.integers(1, 3)), settings["microbatches"])
        tokens = random.integers(1, 129, shape)
        frames = of_audio.integers(0, FRAMES + 1, shape) if hears else None
        more = {} if frames is None else {"frames": frames}
        settings["packs"] = PackSizes(random.integers(0, 5, shape), tokens, tokens**2, more=more)
    return LayoutProblem(profile, **settings)


def refuse_clocks(patch: pytest.MonkeyPatch) -> None:
    for name in ("time", "monotonic", "perf_counter", "process_time"):
        patch.setattr(time, name, lambda: pytest.fail("a clock was read"))
