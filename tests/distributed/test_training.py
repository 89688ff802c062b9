"""Twenty optimizer steps: all layouts end with the same weights, and in half precision with the same loss."""

from pathlib import Path

import pytest

from tests.distributed.cases import TRAINING
from tests.distributed.conftest import run_program

PROGRAM = "tests.distributed.training"


FULL_PRECISION = [name for name in TRAINING if name != "half precision"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("training") / "answers.pt"
    run_program(PROGRAM, 1, "answers", ",".join(FULL_PRECISION), str(path))
    return path


@pytest.mark.parametrize("name", FULL_PRECISION)
def test_all_layouts_train_the_same_weights(weights: Path, name: str) -> None:
    sharded = ["--use-distributed-optimizer"] if "data" in name else []
    result = run_program(PROGRAM, TRAINING[name].ranks, "compare", name, str(weights), *sharded)
    assert len(result) == TRAINING[name].count
    assert max(result.values()) < 1e-4


@pytest.mark.parametrize("precision", ["--bf16", "--fp16"])
def test_half_precision_differs_less_between_layouts_than_between_seeds(tmp_path: Path, precision: str) -> None:
    name, losses = "half precision", []
    for seed in ("8", "7"):  # the last one is the layouts' own
        path = str(tmp_path / seed)
        losses.append(run_program(PROGRAM, 1, "answers", name, path, precision, "--seed", seed))
    spread = [abs(one - other) for one, other in zip(*(seed.values() for seed in losses), strict=True)]
    result = run_program(PROGRAM, 2, "compare", name, path, precision)
    assert max(result.values()) < min(spread)
