"""A tower beside the pipeline on a device of shapes: nothing waits, and plans count the bytes that it takes."""

from dataclasses import replace
from typing import Any

import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.tower import TowerCosts
from tests.long import short
from tests.shapes.test_shapes import run

pytestmark = pytest.mark.starts
SIZES = {
    # tensor- and pipeline-parallel size, tiles and tokens
    "engine": {"internvl3.5-8b": (2, 2, 9, 4096)},
    "local": {"qwen2.5-vl-7b": (2, 2, 2304, 4096)},
}


@pytest.fixture(scope="module", params=short(SIZES, ["engine"]))
def found(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """What every way and rank of each model asked of the device."""
    return request.param, run("beside", request.param, SIZES[request.param])


def costs_of(name: str, sizes: tuple[int, ...], frozen: bool) -> TowerCosts:
    """Of the tower of two layers that is run."""
    tensor, pipeline, tiles, tokens = sizes
    model = preset(name)
    few = replace(model, vision=replace(model.vision, layers=2, feature_layers=()))
    parts = ("vit", "projector") if frozen else ()
    profile = analytic_profile(
        few, "h100", {"tiles": tiles, "tokens": tokens}, tensor, frozen=parts, replica_ranks=tensor * pipeline
    )
    return TowerCosts.of(profile, profile.chain.index("word_embed"))


def test_nothing_waits_with_a_tower_beside(found: tuple[str, dict[str, Any]]) -> None:
    """Copies made anew, images encoded, gradients given back, sums reduced; a frozen tower runs ahead."""
    for name, ranks in found[1].items():
        assert {rank: one["waits"] for rank, one in ranks.items() if one["waits"]} == {}, name


def test_plans_count_the_bytes_of_a_tower_beside(found: tuple[str, dict[str, Any]]) -> None:
    """Copies and sums; what E leaves for V, and what it makes."""
    machine, answers = found
    for name, ranks in answers.items():
        for rank, one in ranks.items():
            way = rank.split()[0]
            costs = costs_of(name, SIZES[machine][name], way == "frozen")
            assert costs.copy_bytes == pytest.approx(one["copies"], rel=0.05), (name, rank)
            assert one["parts"], (name, rank)
            for part in one["parts"]:
                tiles, keeps = part["tiles"], part["keeps"]
                assert costs.output_bytes("tiles") * tiles == pytest.approx(part["made"], rel=0.05), (name, rank)
                held = costs.kept_bytes("tiles", (1, 2) if way == "recomputed" else ())
                assert (held * tiles if keeps else 0) == pytest.approx(part["kept"], rel=0.05), (name, rank)
            seen = {part["keeps"] for part in one["parts"]}
            assert seen == {way != "frozen"}
