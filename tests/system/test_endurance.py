"""The short forms of `tests.endurance`: killed runs, flipped bits, changed saves, random folders and
layouts; and a full disk."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from megatron.vlm.checkpoint.folder import Checkpoints
from omnibal_ext.run_metrics import training_intervals
from tests.distributed.conftest import run_program
from tests.endurance import flags, flips, kills, layouts, saves
from tests.programs import ROOT, warm_interpreter
from tests.slurm_cluster import until

pytestmark = pytest.mark.starts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("endurance")
    kills.prepare(folder, warm_interpreter())
    return folder


def test_a_run_that_is_killed_ends_as_one_left_alone(folder: Path, is_long: bool) -> None:
    count = 12 if is_long else 1
    said = kills.survive(folder, kills=count, iterations=8, seed=1, python=warm_interpreter())
    assert said.startswith(f"{count} kills,")


def test_damage_to_files_of_a_run_changes_nothing_unseen(folder: Path, is_long: bool) -> None:
    kills.undisturbed(folder, 8, warm_interpreter())
    count = 300 if is_long else 40
    found = flips.flip_all(folder, flips=count, seed=1)
    assert sum(found.values()) == count
    assert {verdict.partition(": ")[2] for verdict in found} <= {
        "refused", "passed over for an older save", "made again", "means the same"
    }  # fmt: skip
    assert sum(number for verdict, number in found.items() if "same" in verdict) < count / 6


def test_what_is_changed_in_the_folder_of_a_save_is_not_loaded_unseen(folder: Path, is_long: bool) -> None:
    kills.undisturbed(folder, 8, warm_interpreter())
    count = 300 if is_long else 60
    found = saves.change_all(folder, changes=count, seed=1)
    assert sum(found.values()) == count
    assert {verdict.partition(": ")[2] for verdict in found} <= {
        "passed over for an older save", "holds what was written"
    }  # fmt: skip
    assert sum(number for verdict, number in found.items() if "holds" in verdict) < count / 9


def test_random_folders_are_read_as_transformers_reads_them_or_refused(is_long: bool) -> None:
    pytest.importorskip("transformers")
    count = 100 if is_long else 12
    # As a file, which the fork server does not import: transformers' models choose their kernels then (test_loops.py).
    found: Any = run_program(str(ROOT / "tests/endurance/folders.py"), 1, "--count", str(count), "--seed", "1")
    assert found["wrong"] == []
    assert found["fates"]["equal"] >= count // 3


def test_random_layouts_give_what_one_process_gives_or_are_refused(is_long: bool) -> None:
    fates, wrong = layouts.run(range(60) if is_long else (14, 15, 16))
    assert wrong == []
    assert fates["equal"] >= 3 * fates["refused"] if is_long else fates == {"equal": 2, "refused": 1}


@contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", folder], check=False).returncode:
        pytest.skip("no disk to fill: tmpfs cannot be mounted here (that is root's)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_log_that_nobody_can_keep_ends_no_run(folder: Path) -> None:
    """The disk of the run's folder fills up, and the reader of its output goes away: the run trains to its end."""
    with small_disk(folder / "logs", 16) as disk:
        run = kills.start(folder, "unkept", 12, warm_interpreter(), run_dir=disk / "run", output=subprocess.PIPE)
        until(lambda: (disk / "run/metrics.jsonl").exists() or run.poll() is not None, 240)
        assert run.stdout is not None
        run.stdout.close()
        with (disk / "others").open("wb") as file, suppress(OSError):
            file.write(bytes(2**25))
        assert run.wait(240) == 0
        told = [line["iteration"] for line in training_intervals(disk / "run/metrics.jsonl")]
        assert told == list(range(1, len(told) + 1))
        assert len(told) < 12
        assert Checkpoints(folder / "unkept/checkpoints").newest().iteration == 12


def test_random_flags_are_refused_in_a_line_or_obeyed(folder: Path, is_long: bool) -> None:
    count = 120 if is_long else 12
    found = flags.run(folder, count=count, seed=23)
    assert found.total() == count
    assert found["trained"] >= count // 8
    assert found["refused"] >= count // 3


def fill(disk: Path) -> None:
    """All but two MiB."""
    with (disk / "others").open("wb") as file, suppress(OSError):
        file.write(bytes(shutil.disk_usage(disk).free - 2**21))


def test_a_disk_that_fills_up_in_a_save_ends_no_run_and_the_next_save_tries_again(folder: Path) -> None:
    """There was room when the run started, and there is again. What was half written is no save."""
    with small_disk(folder / "disk", 64) as disk:
        kept = disk / "checkpoints"
        run = kills.start(folder, "full", 20, warm_interpreter(), "--save", kept, "--save-interval", 8)
        until(lambda: kills.reached(folder, "full") > 0 or run.poll() is not None, 240)
        fill(disk)
        until(lambda: kills.reached(folder, "full") > 8 or run.poll() is not None, 240)
        assert not Checkpoints(kept).exist
        (disk / "others").unlink()
        assert run.wait(240) == 0
        log = (folder / "full.log").read_text()
        (said,) = [line for line in log.splitlines() if line.startswith(("warning: --save", "error:"))]
        assert said.startswith(f"warning: --save {kept}: the save of iteration 8 failed: no space left, make room (")
        assert said.endswith("); no save is whole yet; training goes on, and the next save tries again")
        assert "Traceback" not in log
        assert Checkpoints(kept).newest().iteration == 20


@pytest.mark.long
def test_three_saves_that_fail_in_a_row_end_a_run_which_goes_on_from_the_last_whole_one(folder: Path) -> None:
    with small_disk(folder / "third-disk", 64) as disk:
        kept = disk / "checkpoints"
        run = kills.start(folder, "small-run", 100, warm_interpreter(), "--save", kept, "--save-interval", 5)
        until(lambda: Checkpoints(kept).exist or run.poll() is not None, 240)
        fill(disk)
        assert run.wait(240) == 1
        whole = Checkpoints(kept).newest()
        log = (folder / "small-run.log").read_text().splitlines()
        failed = f"--save {kept}: the save of iteration {whole.iteration + 15} failed: "
        (said,) = [line for line in log if line.startswith("error: --save")]
        assert said.startswith(f"error: {failed}")
        assert said.endswith(f"; {whole.path.name} is whole; it is the last of 3 in a row")
        assert sum(line.startswith("warning: --save") for line in log) == 2
