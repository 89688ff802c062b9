"""What a job keeps beside its output is believed where it is whole and its own, and made again where it is not."""

import faulthandler
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from examples.demo.data import make_demo_data
from megatron.vlm.data.formats import lines, table
from megatron.vlm.data.formats.rows import PartSource, Row
from megatron.vlm.preprocessing.inputs import read_inputs
from megatron.vlm.preprocessing.job import PreprocessJob, open_job
from megatron.vlm.preprocessing.parts import PreparedPart
from megatron.vlm.preprocessing.preprocess import preprocess, preview
from omnibal_ext.errors import UserError
from omnibal_ext.reading.document import sealed
from tests.demo import demo_recipe
from tests.unit.data.test_formats import columns
from tests.unit.preprocessing.test_preprocess import contents


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    make_demo_data(folder, samples=30, heldout_samples=1, seed=7)
    return folder


def opened(raw: Path, folder: Path) -> PreprocessJob:
    return open_job([raw / "train.jsonl"], demo_recipe(raw), folder / "dataset", lines_per_part=10)


def noted(folder: Path) -> tuple[Path, Path]:
    """A file of 40 lines, and the note of it."""
    path = folder / "chat.jsonl"
    path.write_bytes(b"".join(b'{"id": %d}\n' % number for number in range(40)))
    read_inputs([path], 7, folder / "notes")
    [note] = (folder / "notes").glob("*.json")
    return path, note


def test_no_change_of_a_note_is_believed(tmp_path: Path) -> None:
    path, note = noted(tmp_path)
    whole, wanted = note.read_bytes(), read_inputs([path], 7)
    generator = random.Random(0)
    for change in range(120):
        changed = bytearray(whole)
        digits = [at for at, byte in enumerate(whole) if 48 <= byte < 58]
        if change % 2:
            changed[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        else:
            changed[generator.choice(digits)] = generator.choice(b"0123456789")
        note.write_bytes(changed[: generator.choice([len(whole), generator.randrange(len(whole))])])
        assert read_inputs([path], 7, note.parent) == wanted
        assert note.read_bytes() == whole  # made again, for the others


@pytest.mark.parametrize(
    "wrong",
    [
        lambda note: {**note, "of": ["another", *note["of"][1:]], "sha256": "0" * 64},
        lambda note: {**note, "parts": [[0, 1]]},
        lambda note: {**note, "parts": "none"},
        lambda note: {name: value for name, value in note.items() if name != "lines"},
        lambda note: [note],
    ],
)
def test_a_sealed_note_of_another_form_or_file_is_made_again(
    tmp_path: Path, wrong: Callable[[dict[str, object]], dict[str, object]]
) -> None:
    path, note = noted(tmp_path)
    changed = wrong(json.loads(note.read_bytes()))
    note.write_text(json.dumps(sealed(changed) if isinstance(changed, dict) else changed))
    assert read_inputs([path], 7, note.parent) == read_inputs([path], 7)


def test_a_note_without_a_seal_is_made_again(tmp_path: Path) -> None:
    """As they were written before they had one."""
    path, note = noted(tmp_path)
    bare = {name: value for name, value in json.loads(note.read_bytes()).items() if name != "manifest_hash"}
    note.write_text(json.dumps({**bare, "lines": 3}))
    assert read_inputs([path], 7, note.parent) == read_inputs([path], 7)


def flipped(job: PreprocessJob) -> None:
    content = bytearray(job.part_path(1).read_bytes())
    content[len(content) // 3] ^= 4
    job.part_path(1).write_bytes(content)


def exchanged(job: PreprocessJob) -> None:
    for one, other in ((0, "other"), (1, "0000000.npz"), ("other", "0000001.npz")):
        (job.part_path(one) if isinstance(one, int) else job.work / one).replace(job.work / other)


def of_another_job(job: PreprocessJob) -> None:
    other = job.work.with_name("0" * 16)
    other.mkdir()
    PreparedPart.load(job.part_path(0)).save(other / "0000001.npz")
    (other / "0000001.npz").replace(job.part_path(1))


def without_its_place(job: PreprocessJob) -> None:
    with np.load(job.part_path(0)) as arrays:
        np.savez(job.part_path(0), **{name: arrays[name] for name in arrays.files if name != "of"})


@pytest.mark.parametrize("damage", [flipped, exchanged, of_another_job, without_its_place])
def test_a_part_that_is_damaged_or_anothers_is_made_again(
    raw: Path, tmp_path: Path, damage: Callable[[PreprocessJob], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess(opened(raw, tmp_path / "wanted"))
    job = opened(raw, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("megatron.vlm.preprocessing.preprocess.merge", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            preprocess(job)
    damage(job)
    preprocess(job)
    assert contents(job.output) == contents(tmp_path / "wanted/dataset")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def dying(part: PartSource, format_rows: Callable[[PartSource], Iterator[Row]]) -> Iterator[Row]:
    if part.first_line == 11:
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)
    yield from format_rows(part)


@pytest.mark.parametrize(("name", "workers"), [("train.jsonl", 2), ("train.parquet", 1), ("train.parquet", 3)])
def test_a_process_that_dies_names_its_lines_and_loses_no_other_part(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, workers: int
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow.parquet").write_table(columns(raw, inside=True), raw / name)
    job = open_job([raw / name], demo_recipe(raw), tmp_path / "dataset", lines_per_part=10)
    room = table if name.endswith(".parquet") else lines
    with monkeypatch.context() as patch:
        rows = room.rows
        patch.setattr(room, "rows", lambda part: dying(part, rows))
        told = rf"{name}: lines 11 to 20: the process that read it was ended by SIGSEGV"
        with pytest.raises(UserError, match=told):
            preprocess(job, workers)
        kept = 3 - len(job.missing())
        assert kept >= 1
        if room is table:
            assert preview(job).endswith("rejected")  # which reads the first lines alone
    assert preprocess(job, workers)["samples"] == 30
