"""Preprocessing as a whole: nothing is lost, nothing is doubled, and no interruption shows in the result."""

import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from examples.demo.data import make_demo_data
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.rejects import reject_limit
from megatron.vlm.preprocessing import inputs
from megatron.vlm.preprocessing.inputs import read_inputs
from megatron.vlm.preprocessing.job import PreprocessJob, Shard, open_job
from megatron.vlm.preprocessing.preprocess import merge_shards, preprocess, preprocess_shard, preview
from omnibal_ext.errors import UserError
from omnibal_ext.packing.corpus import Corpus
from tests.demo import demo_recipe as recipe
from tests.demo import turns, written
from tests.waiting import PATIENCE, until

Files = dict[str, bytes]
SAMPLES = 240


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    make_demo_data(folder, samples=SAMPLES, heldout_samples=1, seed=7)
    lines = (folder / "train.jsonl").read_text().splitlines()
    (folder / "mixed.jsonl").write_text("\n".join([*lines[:100], "nonsense", "", *lines[100:], '{"image": 3}']))
    return folder


def contents(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def reference(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Files:
    output = tmp_path_factory.mktemp("reference") / "dataset"
    preprocess(open_job([raw / "mixed.jsonl"], recipe(raw), output))
    return contents(output)


@pytest.mark.parametrize(("workers", "lines_per_part"), [(1, 1), (1, 7), (2, 7), (2, 1000), (4, 50)])
def test_workers_change_nothing(raw: Path, tmp_path: Path, reference: Files, workers: int, lines_per_part: int) -> None:
    preprocess(open_job([raw / "mixed.jsonl"], recipe(raw), tmp_path / "dataset", lines_per_part), workers)
    assert contents(tmp_path / "dataset") == reference
    assert [path.name for path in tmp_path.iterdir()] == ["dataset"]


def test_every_sample_knows_its_input_file_and_line(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    paths = [raw / "mixed.jsonl", tmp_path / "empty.jsonl", raw / "train.jsonl"]
    preprocess(open_job(paths, recipe(raw), tmp_path / "dataset", lines_per_part=70))
    corpus, dataset = Corpus.of_dataset(tmp_path / "dataset"), ChatDataset(tmp_path / "dataset")
    wanted = zip(map(str, paths), (SAMPLES, 0, SAMPLES), strict=True)
    assert [(source.name, source.samples) for source in corpus.sources] == list(wanted)
    assert dataset.manifest["sources"][0]["rejected"] == 2
    lines = {str(path): path.read_text().splitlines() for path in paths}
    for sample in range(2 * SAMPLES):
        place = corpus.origin_of(sample)
        record = json.loads(lines[place["file"]][place["line"] - 1])
        images = record.get("image") or []
        images = [images] if isinstance(images, str) else images
        assert [image.path for image in dataset.sample(sample).images] == images


def _die(*arguments: Any, **_: Any) -> None:
    if arguments and isinstance(arguments[0], io.BufferedWriter):
        arguments[0].write(b"half")
        arguments[0].flush()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    "moment",
    [
        "numpy.savez",  # half of a part, or of the sizes, is written
        "megatron.vlm.preprocessing.parts.Path.replace",  # a part is written but has no name
        "megatron.vlm.data.indexed_columns.ColumnWriter.append",  # amid the join
        "megatron.vlm.preprocessing.merge.Sizes.save",
        "megatron.vlm.preprocessing.merge.Path.rename",  # all is there but the name
        "megatron.vlm.preprocessing.merge._join_parts",  # before the join begins
    ],
)
def test_killed_at_worst_moments_results_are_the_same(raw: Path, tmp_path: Path, reference: Files, moment: str) -> None:
    job = open_job([raw / "mixed.jsonl"], recipe(raw), tmp_path / "dataset", lines_per_part=100)

    def run_and_die() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(moment, _die)
            preprocess(job)

    process = multiprocessing.get_context("fork").Process(target=run_and_die)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not job.output.exists()
    preprocess(job)
    assert contents(job.output) == reference
    assert [path.name for path in tmp_path.iterdir()] == ["dataset"]


def test_killed_before_it_tidied_up_the_next_run_does(raw: Path, tmp_path: Path, reference: Files) -> None:
    job = open_job([raw / "mixed.jsonl"], recipe(raw), tmp_path / "dataset")
    preprocess(job)
    job.work.mkdir(parents=True)
    (job.work / "0000000.npz").touch()
    preprocess(job)
    assert contents(job.output) == reference
    assert [path.name for path in tmp_path.iterdir()] == ["dataset"]


def test_workers_end_when_their_parent_is_killed(raw: Path, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    job = open_job([raw / "mixed.jsonl"], recipe(raw, decode_images=True), tmp_path / "dataset", lines_per_part=1)
    process = fork.Process(target=preprocess, args=(job, 2))
    process.start()
    workers = until(psutil.Process(process.pid).children, "workers")
    process.kill()
    process.join()
    assert not psutil.wait_procs(workers, timeout=PATIENCE)[1]


def test_shards_and_a_merge_write_what_one_run_writes(raw: Path, tmp_path: Path, reference: Files) -> None:
    job = open_job([raw / "mixed.jsonl"], recipe(raw), tmp_path / "dataset", lines_per_part=30)
    assert preprocess_shard(job, Shard.parse("2/3"))["parts"] == 3
    with pytest.raises(UserError, match="6 of 9 parts are missing, the first is 0"):
        merge_shards(job)
    preprocess_shard(job, Shard.parse("0/3"))
    preprocess_shard(job, Shard.parse("1/3"), workers=2)
    merge_shards(job)
    assert contents(tmp_path / "dataset") == reference


@pytest.mark.parametrize("work", [merge_shards, preprocess])
def test_two_at_once_are_one_after_the_other(
    raw: Path, tmp_path: Path, reference: Files, work: Callable[[PreprocessJob], Any]
) -> None:
    """Merges of one job, or whole jobs, that start a moment apart: both end well, with one good dataset."""
    job = open_job([raw / "mixed.jsonl"], recipe(raw), tmp_path / "dataset", lines_per_part=10)
    if work is merge_shards:
        preprocess_shard(job, Shard())
    fork, moments = multiprocessing.get_context("fork"), random.Random(3)
    for _ in range(4):
        two = [fork.Process(target=work, args=(job,)) for _ in range(2)]
        for process in two:
            process.start()
            time.sleep(moments.uniform(0.0, 0.02))
        for process in two:
            process.join()
        assert [process.exitcode for process in two] == [0, 0]
        assert contents(tmp_path / "dataset") == reference
        if work is merge_shards:
            break
        shutil.rmtree(tmp_path / "dataset")


@pytest.mark.parametrize("text", ["", "1", "3/3", "-1/3", "a/b", "1/2/3", "0/0"])
def test_a_shard_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--shard"):
        Shard.parse(text)


def test_too_many_rejects_fail_the_run_before_and_after(raw: Path, tmp_path: Path) -> None:
    job = open_job([raw / "mixed.jsonl"], recipe(raw), tmp_path / "dataset")
    with pytest.raises(UserError, match=r"limit 1: 2 malformed_line; .*mixed.jsonl line 101"):
        preprocess(job, max_rejects=1)
    assert not (tmp_path / "dataset").exists()
    assert preprocess(job, max_rejects=2)["rejected"] == 2
    with pytest.raises(UserError, match="limit 1: "):
        preprocess(job, max_rejects=1)


def test_many_rejects_fail_a_run_that_set_no_limit(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (raw / "train.jsonl").read_text().splitlines()
    bad = [line.replace('"image"', '"image_path"') for line in lines if '"image"' in line][:11]
    (raw / "renamed.jsonl").write_text("\n".join([*lines, *bad]))
    job = open_job([raw / "renamed.jsonl"], recipe(raw), tmp_path / "dataset", lines_per_part=50)
    with pytest.raises(UserError, match=r"11 of 251 lines rejected, limit 10: 11 unsupported_field") as refusal:
        preprocess(job)
    listed = Path(str(refusal.value).split("all are in ")[1].split(";")[0])
    assert [json.loads(line)["line"] for line in listed.read_text().splitlines()] == list(range(241, 252))
    assert not job.output.exists()
    monkeypatch.setattr("megatron.vlm.preprocessing.preprocess.prepare_part", None)  # nothing is prepared again
    assert preprocess(job, max_rejects=11)["rejected_by_reason"] == {"unsupported_field": 11}


def test_a_preview_reads_the_first_lines_of_every_file_and_writes_nothing(raw: Path, tmp_path: Path) -> None:
    files = [raw / "train.jsonl", raw / "mixed.jsonl"]
    job = open_job(files, recipe(raw), tmp_path / "dataset", lines_per_part=20)
    assert preview(job) == f"2 files of {2 * SAMPLES + 3} lines; of the first 40 0 rejected"
    (tmp_path / "alone.jsonl").write_bytes((raw / "train.jsonl").read_bytes())
    lost = open_job([tmp_path / "alone.jsonl"], replace(recipe(raw), image_root=None), tmp_path / "dataset", 20)
    with pytest.raises(UserError, match=r"of 20 lines rejected, .* missing_image; .*--image-root"):
        preview(lost)
    assert not job.output.exists()
    assert not job.work.exists()


def test_one_line_in_a_hundred_may_be_bad() -> None:
    assert [reject_limit(lines, None) for lines in (5, 1000, 1099, 1100, 200_000)] == [10, 10, 10, 11, 2000]
    assert reject_limit(1_000_000, 0) == 0


def test_nobody_waits_for_the_end_of_an_input_that_is_all_wrong(raw: Path, tmp_path: Path) -> None:
    lines = [{"image": "nowhere.png", "conversations": turns("<image>", "a5")}] * 100
    job = open_job([written(raw / "nowhere.jsonl", *lines)], recipe(raw), tmp_path / "dataset", lines_per_part=20)
    with pytest.raises(UserError, match="20 of 20 lines rejected, limit 10: 20 missing_image") as refusal:
        preprocess(job)
    assert len(job.missing()) == 4
    listed = Path(str(refusal.value).split("all are in ")[1].split(";")[0])
    assert len(listed.read_text().splitlines()) == 20


def test_a_folder_that_holds_something_else_is_left_alone(raw: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(UserError, match="output-dir"):
        preprocess(open_job([raw / "mixed.jsonl"], recipe(raw), tmp_path))
    assert (tmp_path / "mine.txt").read_text() == "precious"


# Lines of all kinds, good ones among them, for the property below.
_TEXT = st.text(alphabet="ab5 \n<image>é\0\r\u2028\ud800🐈", max_size=12)
_TURN = st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt", "system", "tool"]), "value": _TEXT})
_QUESTION = st.sampled_from([{"from": "human", "value": words} for words in ("Read", "<image>", "a<image>b")])
_GOOD = st.fixed_dictionaries(
    {"conversations": st.tuples(_QUESTION, st.fixed_dictionaries({"from": st.just("gpt"), "value": _TEXT}))},
    optional={"image": st.sampled_from(["good.png", "cut.png", "nowhere.png", "../good.png", ["good.png"], []])},
)
_RECORD = st.fixed_dictionaries({"conversations": st.lists(_TURN, max_size=4)}, optional={"image": _TEXT})
_LINE = st.one_of(
    (_GOOD | _RECORD | st.none() | st.integers()).map(lambda record: json.dumps(record).encode()),
    st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")),
)


@given(st.lists(_LINE, max_size=12), st.booleans())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_samples_and_rejects_are_the_input(raw: Path, tmp_path: Path, lines: list[bytes], ends: bool) -> None:
    Image.fromarray(np.zeros((32, 64, 3), np.uint8)).save(raw / "good.png")
    (raw / "cut.png").write_bytes((raw / "good.png").read_bytes()[:-20])
    source, output = tmp_path / "lines.jsonl", tmp_path / "dataset"
    source.write_bytes(b"\n".join(lines) + b"\n" * ends)
    for left in tmp_path.glob("dataset*"):
        shutil.rmtree(left)
    try:
        preprocess(open_job([source], recipe(raw), output, lines_per_part=5), max_rejects=len(lines))
        samples = len(ChatDataset(output))
    except UserError as error:
        assert "no line of the input can be used" in str(error)  # noqa: PT017 - other inputs have usable lines
        samples, output = 0, next(tmp_path.glob("dataset.work/*/dataset.*"))
    rejected = [json.loads(line) for line in (output / "rejected.jsonl").read_text().splitlines()]
    numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]
    assert samples + len(rejected) == len(numbers)
    assert {row["line"] for row in rejected} <= set(numbers)
    assert len({row["line"] for row in rejected}) == len(rejected)
    assert all(row["reason"] and row["detail"] and row["file"] == str(source) for row in rejected)
    if samples:
        manifest = json.loads((output / "manifest.json").read_text())
        assert manifest["samples"] == samples
        assert sum(manifest["rejected_by_reason"].values()) == manifest["rejected"] == len(rejected)


def test_what_one_shard_has_read_the_others_need_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's inputs are read once, however many shards it has, and anew when they have changed."""
    path, notes = tmp_path / "chat.jsonl", tmp_path / "work/inputs"
    path.write_bytes(b"".join(b"%d\n" % number for number in range(1203)))
    first = read_inputs([path], 500, notes)
    assert first == read_inputs([path], 500)
    assert [part.lines for part in first[0].parts] == [500, 500, 203]
    monkeypatch.setattr(inputs, "read_input", None)
    assert read_inputs([path], 500, notes) == first
    monkeypatch.undo()
    assert read_inputs([path], 600, notes)[0].parts != first[0].parts
    path.write_bytes(path.read_bytes().replace(b"7", b"8"))  # as long as before
    assert read_inputs([path], 500, notes)[0].sha256 != first[0].sha256
    path.unlink()
    with pytest.raises(UserError, match=r"cannot be read \(No such file"):
        read_inputs([path], 500, notes)
