"""The sweep uses all GPUs, ranks by samples a second, and keeps what cannot be planned with its reason."""

import numpy as np
import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.profile import Profile
from omnibal_ext.layout.sweep import settings, sweep
from omnibal_ext.sizes import Sizes


def _profile(vit: int, llm: int, tensor: int, data: int, _: int) -> Profile:
    return analytic_profile(preset("internvl-chat-1.5"), "a100", vit, llm, tensor, data)


def test_settings_use_every_gpu_once() -> None:
    points = list(settings(8, (1, 2, 3), (1, 2, 4), (1, 2), ("1f1b", "zb_h1"), ((9, 4096),)))
    assert all(
        p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.data_parallel_size == 8 for p in points
    )
    assert len(points) == len(set(points)) == 2 * (1 + 4 + 4)


def test_experts_are_dealt_over_what_divides_the_ranks_of_a_stage() -> None:
    points = list(settings(8, (1, 2), (1, 4), (1,), ("1f1b",), ((9, 4096),), (1, 2, 8)))
    dealt = {(p.pipeline_model_parallel_size, p.expert_model_parallel_size) for p in points}
    assert dealt == {(1, 1), (1, 2), (1, 8), (4, 1), (4, 2)}


@pytest.mark.long
def test_outcomes_are_ranked_and_misfits_say_why() -> None:
    random = np.random.default_rng(0)
    sizes = Sizes.from_arrays(random.integers(1, 5, 600), random.integers(1100, 1600, 600))
    points = settings(32, (1, 2), (2, 4), (1,), ("1f1b", "zb_h1"), ((9, 4096),))
    outcomes = sweep(points, sizes, 64, 80e9, _profile, seconds=0.05)
    speeds = [o.samples_per_second for o in outcomes]
    assert len(outcomes) == 8
    assert speeds == sorted(speeds, reverse=True)
    assert all(o.reason if o.problem is None else 0 < o.fraction_of_ideal < 1 for o in outcomes)
    assert any("over the limit" in o.reason for o in outcomes)
    best = outcomes[0]
    assert best.problem is not None
    step = best.problem.step_seconds(best.candidates[0].layout)
    assert best.candidates[0].step_seconds == pytest.approx(step)
