"""Any layout, schedule, recomputation and freeze gives the loss and the gradients of one process, to 1e-5 relative."""

from pathlib import Path

import pytest

from tests.chains import layer_chain
from tests.distributed.cases import LAUNCHES, STRICT
from tests.distributed.conftest import run_program
from tests.long import short_launches

TOLERANCE = 1e-5


@pytest.mark.parametrize("name", short_launches(LAUNCHES))
def test_every_case_equals_one_process(answers: Path, name: str) -> None:
    launch = LAUNCHES[name]
    limit = ("--distributed-timeout-minutes", "7")  # of the pipeline's channels too
    result = run_program("tests.distributed.parity", launch.ranks, name, str(answers), *limit, server=launch.server)
    assert len(result) == len(set(LAUNCHES[name].cases()))
    wrong = {case: difference for case, difference in result.items() if not difference < TOLERANCE}
    assert not wrong


@pytest.mark.parametrize(("model", "vit_layers"), [("features", 4), ("wide_norm", 4), ("layerless", 0)])
def test_images_are_cut_everywhere_on_their_way(model: str, vit_layers: int) -> None:
    """Between every two layers of the models whose features jump, and of the one without a ViT, also where images come
    with them: here, or in test_strict_transport.py."""
    chain = layer_chain(vit_layers, 4)
    first = {
        stage.layers[0]
        for launch in (LAUNCHES | STRICT).values()
        for case in launch.cases()
        if launch.pipeline > 1 and case.question.model == model and case.question.packs != "text only"
        for stage in case.plan(chain, launch.pipeline).stages
    }
    assert first == set(range(len(chain)))


def test_a_wrong_weight_is_noticed(answers: Path) -> None:
    """The comparison itself can fail: other weights than the answers' give other gradients."""
    result = run_program("tests.distributed.parity", 1, "one rank", str(answers), "--seed", "8")
    asked = {str(case): case.question for case in LAUNCHES["one rank"].cases()}
    bare = {name for name, one in asked.items() if one.packs == "text only" and "llm" in one.freeze}
    assert min(result[name] for name in asked.keys() - bare) > 1000 * TOLERANCE
    assert all(result[name] > 10 * TOLERANCE for name in bare)  # by the loss alone: nothing trained has a gradient
