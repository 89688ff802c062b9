"""A few optimizer steps: all layouts end with the same weights; in half precision with the same gradients."""

from pathlib import Path

import pytest

from tests.distributed.cases import TRAINING
from tests.distributed.conftest import run_program
from tests.long import short_launches

PROGRAM = "tests.distributed.training"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, is_long: bool) -> Path:
    path = tmp_path_factory.mktemp("training") / "answers"
    names = [name for name, launch in TRAINING.items() if is_long or not launch.is_long]
    run_program(PROGRAM, 1, "answers", ",".join(names), str(path))
    return path


@pytest.mark.parametrize("name", short_launches(TRAINING))
def test_all_layouts_train_the_same_weights(weights: Path, name: str) -> None:
    # Buckets of a few weights: several a layer, so that data-parallel ranks could reduce and gather in different
    # orders.
    sharded = (
        ["--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "500"] if "data" in name else []
    )
    # Where all that ranks exchange comes together, the transport is strict too.
    strict = ("tests.distributed.strict_transport", "training"), (PROGRAM, "compare")
    program, what = strict[name != "data and pipeline"]
    result = run_program(program, TRAINING[name].ranks, what, name, str(weights), *sharded)
    assert len(result) == len(set(TRAINING[name].cases()))
    assert max(result.values()) < 1e-4


def test_half_precision_differs_by_its_rounding() -> None:
    """Gradients of the same rounded weights in fp32, in units of the last bit: chunks, zero bubble, scaled losses."""
    result = run_program("tests.distributed.half_precision", 2)
    assert len(result) == 3 * 2 * 2
    for name, units in result.items():
        assert units < (0.3 if name.endswith("loss") else 30), name  # seen: 0.03 and 5
