"""The short forms of `tests.endurance`: runs that are killed, files in which bits flip."""

from pathlib import Path

import pytest

from tests.endurance import flips, kills
from tests.programs import warm_interpreter

pytestmark = pytest.mark.starts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endurance")
    kills.prepare(folder, warm_interpreter())
    return folder


def test_a_run_that_is_killed_ends_as_one_left_alone(folder: Path) -> None:
    assert kills.survive(folder, kills=1, iterations=6, seed=1, python=warm_interpreter()).startswith("1 kills,")


def test_flipped_bits_change_nothing_unseen(folder: Path) -> None:
    if not (folder / "alone/checkpoints").exists():
        assert kills.start(folder, "alone", 8, warm_interpreter()).wait() == 0
    found = flips.flip_all(folder, flips=60, seed=1)
    assert sum(found.values()) == 60
    assert {verdict.partition(": ")[2] for verdict in found} <= {
        "refused", "passed over for an older save", "means the same"
    }  # fmt: skip
    assert sum(count for verdict, count in found.items() if "same" in verdict) < 10
