"""With the tower beside the pipeline any lists, parts, owners and layout give one process's loss and gradients."""

from pathlib import Path

import pytest

from tests.distributed.beside_cases import LAUNCHES
from tests.distributed.conftest import run_program
from tests.long import short_launches

PROGRAM, STRICT = "tests.distributed.beside", "tests.distributed.strict_transport"


@pytest.fixture(scope="module")
def answers_beside(tmp_path_factory: pytest.TempPathFactory, is_long: bool) -> Path:
    path = tmp_path_factory.mktemp("beside") / "answers"
    run_program(PROGRAM, 1, "all answers" if is_long else "answers", str(path))
    return path


@pytest.mark.parametrize("name", short_launches(LAUNCHES))
def test_every_case_equals_one_process(answers_beside: Path, name: str) -> None:
    launch, flags = LAUNCHES[name], ["--distributed-timeout-minutes", "4"]
    program, words = PROGRAM, [name]
    if "pipeline" in name and launch.ranks > 2:  # what several exchange, over a transport as strict as NCCL
        program, words = STRICT, ["beside", name]
        flags += ["--overlap-grad-reduce", "--ddp-bucket-size", "1000"]
    result = run_program(program, launch.ranks, *words, str(answers_beside), *flags)
    assert len(result) == len(set(launch.cases()))
    assert not {case: difference for case, difference in result.items() if not difference < 1e-5}


def test_the_grid_has_every_mode_and_model_with_every_way_of_keeping() -> None:
    drawn = [case for launch in LAUNCHES.values() for case in launch.cases()]
    trained = [case for case in drawn if not {"vit", "projector"} <= set(case.case.question.freeze)]
    assert {(case.mode, case.kept) for case in trained} == {
        (mode, kept) for mode in ("first", "bubbles") for kept in ("kept", "recomputed")
    }
    assert {case.case.question.model for case in trained} == {case.case.question.model for case in drawn}
    assert {case.case.question.packs for case in trained} >= {"all", "text only", "one of many"}
    assert len(trained) < len(drawn)


def test_steps_evaluations_and_order(tmp_path: Path) -> None:
    """One process's weights; bit for bit the same once more with evaluations, and with all E first and V last."""
    program, answers = "tests.distributed.beside_training", tmp_path / "answers"
    run_program(program, 1, "answers", str(answers))
    result = run_program(program, 4, "compare", str(answers))
    assert len(result) == 3 + 3 + 2
    for name, difference in result.items():
        assert difference < 1e-4 if name.endswith("one process") else difference == 0, name
    # Sharded over two pipelines, over a strict transport: copies wait for weights that are gathered meanwhile.
    sharded = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
    flags = (*sharded, "--ddp-bucket-size", "500")
    result = run_program(STRICT, 4, "steps_beside", "data and pipeline", str(answers), *flags)
    assert len(result) == 3
    assert max(result.values()) < 1e-4
