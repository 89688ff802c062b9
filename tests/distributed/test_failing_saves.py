"""A save that fails, wherever a rank's files fail, fails on all ranks and hangs none; training goes on."""

import json
from typing import Any

import pytest

from tests.distributed.conftest import run_program
from tests.long import short


@pytest.fixture(scope="module", params=short(["sync", "async"], ["sync"]))
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp(request.param)
    assert run_program("tests.distributed.failing_saves", 2, str(folder), request.param)["ranks"] == 2
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_save_is_whole_or_has_failed_on_all_ranks_and_the_last_one_stays(ranks: list[Any]) -> None:
    """Of a failed one nothing is left, and the tracker is where it was."""
    mine, other = (rank["places"] for rank in ranks)
    assert mine == other
    assert len(mine) > 5
    for place in mine:
        failed, iteration, before = place["failed"], place["iteration"], place["before"]
        newest = before if failed else iteration  # not every error means something: a folder may be there already
        assert place["after"] == {"newest": newest, "left": not failed, "tracked": newest}, place
        if failed:
            assert f"the save of iteration {iteration} failed: " in failed
            assert "Input/output error" in failed
            assert failed.endswith(f"; iter_{before:07d} is whole")
            assert "\n" not in failed
    assert sum(bool(place["failed"]) for place in mine) > len(mine) / 3


def test_the_third_failed_save_in_a_row_ends_the_run_on_all_ranks(ranks: list[Any]) -> None:
    for rank in ranks:
        *goes_on, last = rank["three"]
        assert goes_on == ["goes on"] * 2
        assert "the save of iteration 213 failed: " in last
        assert last.endswith("; iter_0000202 is whole; it is the last of 3 in a row")


def test_a_writer_that_has_died_fails_one_save_at_most(ranks: list[Any]) -> None:
    """Killed between saves it is started again; killed in one it fails that one, on all ranks."""
    mine, other = (rank["lost"] for rank in ranks)
    assert mine == other
    for before, amid, after in [mine] if mine else []:
        assert (before, after) == ("", "")
        assert "the save of iteration 200 failed: rank 1: the process that writes its saves has ended" in amid


def test_no_number_is_saved_that_nobody_has_written(ranks: list[Any]) -> None:
    """The program fills new memory with NaN. The buffers of the optimizer have gaps between weights."""
    assert [rank["unwritten"] for rank in ranks] == [[], []]
