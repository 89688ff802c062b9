"""What hosts take to ask for a layout is part of what it is judged by, in searches and in the simulator alike."""

from dataclasses import replace
from itertools import pairwise

import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.layout.partition import even_edges
from omnibal_ext.layout.problem import Layout, LayoutProblem


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_step_takes_no_less_than_its_hosts(schedule: str) -> None:
    """Small packs of a model whose layers take 10 ms to be asked for; the device takes far less. One that is run again
    is asked for once more."""
    profile = analytic_profile(preset("internvl3.5-2b"), "h100", 1, 512)
    layers = {
        kind: replace(cost, host_forward_seconds=0.01, host_backward_seconds=0.02)
        for kind, cost in profile.layers.items()
    }
    slow = replace(profile, layers=layers, host_action_seconds=0.001)
    ranks, microbatches = 2, 4
    edges = even_edges([1.0] * len(profile.chain), ranks)
    again = ((1, 2), ())
    found = {}
    for name, one in (("device", profile), ("host", slow)):
        problem = LayoutProblem(one, ranks, microbatches, schedule_name=schedule)
        for what, layout in (("kept", Layout(edges, ((), ()))), ("again", Layout(edges, again))):
            found[name, what] = problem.step_seconds(layout)
            assert problem.simulate(layout).step_seconds == pytest.approx(found[name, what])
    actions = 3 if schedule == "zb_h1" else 2
    fullest = max(end - start for start, end in pairwise(edges))
    assert found["host", "kept"] >= microbatches * (0.03 * fullest + 0.001 * actions)
    assert found["device", "kept"] < 0.5 * found["host", "kept"]
    assert found["host", "again"] > found["host", "kept"]
