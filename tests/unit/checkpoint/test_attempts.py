"""A run ends well only if its last save did; what is said of a failed one is a line. Ranks: `tests.distributed`."""

from contextlib import nullcontext
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from megatron.vlm.checkpoint import attempts as module
from megatron.vlm.checkpoint.attempts import Attempts
from megatron.vlm.ending import UnfinishedError
from omnibal_ext.errors import UserError


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_gather_object", lambda everyone, mine: everyone.__setitem__(0, mine))


@pytest.mark.parametrize("code", [None, 0, 1, "returns"])
@pytest.mark.parametrize("failed", [False, True])
def test_a_run_ends_well_only_if_its_last_save_did(tmp_path: Path, failed: bool, code: object) -> None:
    """However it ends: at its last iteration, or where it was asked to (exit code 0)."""
    attempts = Attempts()
    with attempts.tried(tmp_path / "iter_0000007"):
        raise UserError("no room: 2 GiB needed, 1 free")
    if not failed:
        attempts.succeeded()
    claims = failed and code in (0, "returns")
    why = (
        "the save of iteration 7 failed: no room: 2 GiB needed, 1 free; no save is whole yet; the run has ended without"
    )
    ends = pytest.raises(SystemExit) if code != "returns" else nullcontext()
    with pytest.raises(UnfinishedError, match=why) if claims else ends, attempts.ends_saved():
        if code != "returns":
            raise SystemExit(code)


def test_a_save_in_between_makes_failures_no_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempts = Attempts()
    for _ in range(3):
        for _ in range(module.MOST - 1):
            with attempts.tried(tmp_path / "iter_0000007"):
                raise UserError("no")
        attempts.succeeded()
    assert len(capsys.readouterr().err.splitlines()) == 3 * (module.MOST - 1)


def test_the_last_failed_save_in_a_row_ends_the_run(tmp_path: Path) -> None:
    attempts = Attempts()
    for _ in range(module.MOST - 1):
        with attempts.tried(tmp_path / "iter_0000007"):
            raise UserError("no")
    with (
        pytest.raises(UnfinishedError, match="it is the last of 3 in a row"),
        attempts.tried(tmp_path / "iter_0000008"),
    ):
        raise UserError("no")


def test_an_error_that_not_all_ranks_have_raised_is_none_of_a_save(tmp_path: Path) -> None:
    """Others may wait for this rank: torchrun ends them."""
    with pytest.raises(OSError, match="gone"), Attempts().tried(tmp_path / "iter_0000007"):
        raise OSError("gone")


@pytest.mark.parametrize("is_begun", [False, True])
def test_only_what_this_save_has_written_is_removed(tmp_path: Path, is_begun: bool) -> None:
    """Before room is made the folder of that name is an older save's, which will be put aside."""
    attempts, folder = Attempts(), tmp_path / "iter_0000007"
    folder.mkdir()
    (folder / "integrity.json").write_text("{}")
    attempts.is_begun = is_begun
    with attempts.tried(folder):
        raise UserError("no")
    assert folder.exists() != is_begun


def test_the_reason_is_a_short_line_and_names_the_rank(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=module.SPARE))
    failures = {3: (RuntimeError("a\nworker " + "x" * 5000), StackSummary())}
    with Attempts().tried(tmp_path / "iter_0000007"):
        raise CheckpointException("write", failures)
    (said,) = capsys.readouterr().err.splitlines()
    assert "the save of iteration 7 failed: rank 3: a worker xxx" in said
    assert len(said) < 2000
