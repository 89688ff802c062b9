"""Media in a store are those of the folder that it serves, at few requests; faults are one line each, or pass."""

import asyncio
import io
import json
import logging
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from examples.demo.data import make_demo_data
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.loader import Needs, PackDataset, microbatches
from megatron.vlm.data.media.tile_cache import KeptTiles, TileCache
from megatron.vlm.preprocessing.job import open_job
from megatron.vlm.preprocessing.preprocess import measure, preprocess
from omnibal_ext.errors import UserError
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.reading import objects, stores
from omnibal_ext.reading.files import open_plain, open_regular, size_of
from omnibal_ext.reading.stores import StoreError, StorePath, located
from tests import store
from tests.demo import demo_packs, demo_recipe, turns, written
from tests.media import seen, tiles_of
from tests.unit.data.clips import inside, noise
from tests.unit.data.test_crc import encoded

store.required()
import s3fs  # noqa: E402
from fsspec.asyn import get_loop  # noqa: E402

COUNT = 6
SAID = turns("<image>\nabc?", "abc")
EVERYTHING = Needs(frozenset({"tiles"}), tokens=True, labels=True)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    make_demo_data(folder, samples=1, heldout_samples=1, seed=0)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[store.Store]:
    with store.running(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def served(server: store.Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[store.Store]:
    """The store, without faults or anything known of it; retries take hundredths of seconds."""
    stores.head.cache_clear()
    server.seen.clear()
    server.fault, server.delay, server.most, server.sent = lambda number, key: None, 0.0, 0, 0
    monkeypatch.setattr(stores, "WAIT", 0.02)
    yield server
    stores._lost.clear()
    for key in [*objects._begun]:
        objects.forget(key)
    while server.now or any("_tried" in repr(task.get_coro()) for task in asyncio.all_tasks(get_loop())):
        time.sleep(0.01)  # what was asked for, and is not waited for, would be seen by the next test


def pictures(folder: Path, ending: str = "jpg", count: int = COUNT) -> Path:
    """Conversations about a picture each."""
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number}.{ending}").write_bytes(encoded(number, {"jpg": "JPEG"}.get(ending, ending)))
    said = ({"image": f"{number}.{ending}", "conversations": SAID} for number in range(count))
    return written(folder / "chat.jsonl", *said)


def both(words: Path, served: store.Store, file: Path, output: Path) -> tuple[ChatDataset, ChatDataset]:
    """Datasets of a file below the store's root: read from the folder, and from the store."""
    found = []
    for name, path in (("local", file), ("stored", located(served.url) / file.relative_to(served.root))):
        recipe = replace(demo_recipe(words, max_tiles=6), image_root=path.parent)
        preprocess(open_job([path], recipe, output / name), max_rejects=0)
        found.append(ChatDataset(output / name))
    return found[0], found[1]


def packs(data: ChatDataset) -> PackDataset:
    index = demo_packs(
        data, data.folder.with_name(f"{data.folder.name}-packs"), PackOptions(vit_budget=30, llm_budget=400)
    )
    return PackDataset(data, index, EVERYTHING)


@pytest.mark.parametrize("seed", range(3))
def test_any_reads_of_an_object_are_those_of_the_file(served: store.Store, seed: int) -> None:
    draw = random.Random(seed)
    content = draw.randbytes(draw.choice([1, stores.FIRST, stores.FIRST + 1, 700_001]))
    (served.root / f"reads{seed}").write_bytes(content)
    with open_plain(located(f"{served.url}/reads{seed}"), "") as file:
        assert size_of(file) == len(content)
        for _ in range(50):
            start, size = draw.randrange(len(content) + 9), draw.randrange(90_000)
            file.seek(start)
            assert file.read(size) == content[start : start + size]
        file.seek(0)
        assert b"".join(iter(lambda: file.readline(5000), b"")) == content
        assert file.seek(-1, io.SEEK_END) == len(content) - 1


def test_reading_in_order_takes_few_requests(served: store.Store) -> None:
    (served.root / "long").write_bytes(bytes(2**22))
    with open_plain(located(f"{served.url}/long"), "") as file:
        assert len(b"".join(iter(lambda: file.read(1000), b""))) == 2**22
    assert len(served.seen) <= 8


KINDS = ("jpg", "png", "tar", "base64", "parquet", "list")


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_of_a_store_is_the_folders(words: Path, served: store.Store, tmp_path: Path, kind: str) -> None:
    folder = served.root / f"same-{kind}"
    if kind in ("jpg", "png", "list"):
        file = pictures(folder, "png" if kind == "png" else "jpg")
    else:
        folder.mkdir()
        file = inside(kind, folder, "image", [encoded(number) for number in range(COUNT)], SAID)
    if kind == "list":
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        (file := folder / "list.json").write_text(json.dumps(lines))
    local, far = both(words, served, file, tmp_path)
    assert [*local.sizes.tiles], [*local.sizes.tokens] == ([*far.sizes.tiles], [*far.sizes.tokens])
    for number in range(COUNT):
        here, there = local.sample(number), far.sample(number)
        assert np.array_equal(here.text[0], there.text[0])
        assert np.array_equal(tiles_of(here), tiles_of(there))
    noted = {type(mark) for number in range(COUNT) for mark in far.sample(number).images[0].crcs}
    assert noted == ({int} if kind in ("base64", "parquet") else {str})  # these were read whole


def test_the_size_of_a_photograph_costs_one_request_of_kilobytes(
    words: Path, served: store.Store, tmp_path: Path
) -> None:
    folder = served.root / "large"
    pictures(folder, count=40)
    for number in range(40):
        Image.fromarray(noise(1, 1600, 1200, seed=number)[0]).save(folder / f"{number}.jpg", quality=95)
    assert (folder / "0.jpg").stat().st_size > 10 * stores.FIRST
    recipe = replace(demo_recipe(words, max_tiles=6), image_root=located(f"{served.url}/large"))
    preprocess(open_job([located(f"{served.url}/large/chat.jsonl")], recipe, tmp_path / "data"), max_rejects=0)
    asked = [line for line in served.seen if ".jpg" in line]
    assert len(asked) == 40
    assert len(served.seen) <= 1.2 * 40
    assert served.sent <= 41 * stores.FIRST
    served.seen.clear()
    measure([located(f"{served.url}/large/chat.jsonl")], replace(recipe, image_checksums=False))
    assert served.sent <= 2 * 41 * stores.FIRST


@pytest.mark.parametrize("kind", ["jpg", "tar"])
def test_a_changed_object_is_named_and_its_sample_weighs_nothing(
    words: Path, served: store.Store, tmp_path: Path, kind: str
) -> None:
    folder = served.root / f"changed-{kind}"
    if kind == "tar":
        folder.mkdir()
        file = inside("tar", folder, "image", [encoded(number) for number in range(COUNT)], SAID)
    else:
        file = pictures(folder)
    data = packs(both(words, served, file, tmp_path)[1])
    assert not any(batch.broken for batch in microbatches(data, range(data.index.num_packs)))
    changed = file if kind == "tar" else folder / "3.jpg"
    kept = changed.read_bytes()
    changed.write_bytes(kept[:600] + bytes([kept[600] ^ 1]) + kept[601:])
    broken = [fault for batch in microbatches(data, range(data.index.num_packs)) for fault in batch.broken]
    assert len(broken) == (COUNT if kind == "tar" else 1)
    assert all("is not what was preprocessed" in why and str(located(served.url)) in why for _, why in broken)
    taken = PackDataset(ChatDataset(data.data.folder, checks_images=False), data.index, EVERYTHING)
    assert not any("not what was" in why for pack in range(data.index.num_packs) for _, why in taken[pack].broken)


def test_packs_read_ahead_are_the_folders_and_nothing_is_left_begun(
    words: Path, served: store.Store, tmp_path: Path
) -> None:
    local, far = map(packs, both(words, served, pictures(served.root / "ahead", count=24), tmp_path))
    numbers = [*range(local.index.num_packs), -1, *range(local.index.num_packs)]
    served.seen.clear()
    served.delay = 0.02
    for here, there in zip(map(local.__getitem__, numbers), microbatches(far, numbers), strict=True):
        assert not there.broken
        if here.pack >= 0:
            assert torch.equal(seen(here).values, seen(there).values)  # type: ignore[arg-type]
            assert torch.equal(here.input_ids, there.input_ids)  # type: ignore[arg-type]
    assert len(served.seen) == 2 * 24  # each object once a pass
    assert served.most > 4
    assert objects.in_flight() == 0


@pytest.mark.parametrize("deleted", [False, True])
def test_of_objects_whose_tiles_are_kept_marks_alone_are_read(
    words: Path, served: store.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    """The first bytes of each, ahead of use; all of them where the tiles are gone when they are wanted."""
    folder, count = served.root / f"kept-{deleted}", 12
    file = pictures(folder, count=count)
    for number in range(count):
        Image.fromarray(noise(1, 700, 500, seed=number)[0]).save(folder / f"{number}.jpg", quality=95)
    assert (folder / "0.jpg").stat().st_size > 2 * stores.FIRST
    local, far = both(words, served, file, tmp_path)
    data, due = packs(ChatDataset(far.folder, tile_cache=TileCache(tmp_path / "tiles"))), packs(local)
    numbers = range(data.index.num_packs)

    def broken() -> list[str]:
        found = []
        for number, batch in zip(numbers, microbatches(data, numbers), strict=True):
            found += [why for _, why in batch.broken]
            if not batch.broken:
                assert torch.equal(seen(batch).values, seen(due[number]).values)  # type: ignore[arg-type]
        return found

    assert not broken()
    served.seen.clear()
    served.sent = 0
    if deleted:
        monkeypatch.setattr(KeptTiles, "_read", lambda _: None)
    assert not broken()
    whole = sum(path.stat().st_size for path in folder.glob("*.jpg"))
    assert whole <= served.sent < 1.2 * whole if deleted else served.sent <= count * stores.FIRST
    assert deleted or len(served.seen) == count
    (folder / "3.jpg").write_bytes(encoded(99))
    (why,) = broken()
    assert "3.jpg: is not what was preprocessed: length and ETag" in why
    assert objects.in_flight() == 0


def test_what_is_in_flight_is_bounded(served: store.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    (served.root / "one").write_bytes(bytes(1000))
    monkeypatch.setattr(objects, "MOST_AHEAD", 2500)
    path = located(f"{served.url}/one")
    assert isinstance(path, StorePath)
    begun = [objects.begin(path, start, 1000) for start in (0, 1, 2, 0)]
    assert [key is not None for key in begun] == [True, True, False, False]
    for key in filter(None, begun):
        objects.forget(key)
    assert objects.in_flight() == 0


ENDS = {
    "status 403": "no permission", "status 404": "no such", "status 400": "keys", "status 301": "bucket",
    "status 307": "bucket", "status 500": "no answer", "status 503": "no answer", "cut": "no answer",
    "stall": "no answer", "hang": "no answer",
}  # fmt: skip
"""What is said of a fault that does not pass."""


@pytest.mark.parametrize("fault", ENDS)
def test_a_fault_that_stays_is_a_line_without_keys(
    served: store.Store, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if ENDS[fault] == "no answer":  # which it is too if an answer is late
        monkeypatch.setattr(stores, "SECONDS", 0.5)
        monkeypatch.setattr(stores, "PATIENCE", 3.0)
    (served.root / "one").write_bytes(bytes(1000))
    kind, _, code = fault.partition(" ")
    served.fault = lambda number, key: (kind, float(code or {"cut": 0.5, "stall": 99.0, "hang": 99.0}[kind]))
    with pytest.raises((OSError, StoreError)) as raised:
        open_regular(located(f"{served.url}/one"))
    line = str(raised.value)
    assert ENDS[fault] in line
    assert f"{served.url}/one" in line
    assert "\n" not in line
    assert store.KEY not in line
    assert store.SECRET not in line
    assert not any(store.ELSEWHERE in line for line in served.seen)  # a redirect may lead to any host
    is_of_store = ENDS[fault] in ("keys", "bucket", "no answer")
    assert isinstance(raised.value, StoreError) == is_of_store
    if is_of_store:
        with pytest.raises(StoreError):
            stores.raise_if_lost()
    stores.raise_if_lost()


PASSING: list[store.Fault] = [
    ("status", 500.0), ("status", 503.0), ("cut", 0.5), ("cut", 0.0), ("slow", 0.1), ("stall", 99.0), ("hang", 99.0),
]  # fmt: skip
STAYING: list[store.Fault] = [("status", 403.0), ("status", 404.0), ("changed", 0.0)]
ENDING: list[store.Fault] = [("status", 400.0), ("status", 301.0), ("status", 307.0)]


@pytest.mark.parametrize("seed", range(2))
def test_faults_at_random_pass_or_are_a_line_each(
    words: Path, served: store.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Thirty objects, each with a fault of its own: one that passes, one of its own that stays, or one of the store's,
    which ends the run; that goes on where it was once the store's is gone."""
    monkeypatch.setattr(stores, "SECONDS", 3.0)
    draw, count, folder = random.Random(seed), 30, served.root / f"faults{seed}"
    local, far = map(packs, both(words, served, pictures(folder, count=count), tmp_path))
    numbers = [*range(local.index.num_packs)]
    due = [seen(local[number]).values for number in numbers]
    kinds = [*PASSING, *STAYING, *ENDING]
    drawn = [*kinds, *draw.choices(kinds, k=count - len(kinds))]
    met = dict(zip((f"{folder.name}/{number}.jpg" for number in range(count)), draw.sample(drawn, count), strict=True))
    for key in (key for key, kind in met.items() if kind[0] == "changed"):
        (served.root / key).write_bytes(encoded(count, "JPEG"))
    tries, ended, broken, went = Counter[str](), list[str](), dict[int, str](), 0

    def fault(number: int, key: str) -> store.Fault | None:
        kind, tries[key] = met.get(key), tries[key] + 1  # also of the bucket, where it is asked for its region
        return None if kind in (None, STAYING[2]) or (kind in PASSING and tries[key] > 1 + draw.randrange(2)) else kind

    served.fault = fault
    while went < len(numbers):
        try:
            for batch in microbatches(far, numbers[went:]):
                broken |= dict(batch.broken)
                if not batch.broken:
                    assert torch.equal(seen(batch).values, due[went])  # type: ignore[arg-type]
                went += 1
        except StoreError as error:
            ended.append(str(error))
            culprit = next(key for key in met if f"{served.url}/{key}:" in str(error))
            assert met[culprit] in ENDING
            met[culprit] = ("slow", 0.0)
            stores._lost.clear()
    assert ended
    assert objects.in_flight() == 0
    assert broken.keys() == {number for number in range(count) if met[f"{folder.name}/{number}.jpg"] in STAYING}
    for why in (*broken.values(), *ended):
        assert "\n" not in why
        assert store.KEY not in why
        assert store.SECRET not in why
        assert re.search("no permission|no such|not what was preprocessed|refuses the keys", why)


def test_a_store_that_is_lost_ends_the_run_and_is_no_bad_sample(
    words: Path, served: store.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = both(words, served, pictures(served.root / "lost"), tmp_path)[1]
    monkeypatch.setattr(stores, "PATIENCE", 3.0)
    served.fault = lambda number, key: ("status", 500.0)
    with pytest.raises(StoreError, match="gives no answer"):
        [*microbatches(packs(data), range(1))]
    stores.head.cache_clear()
    recipe = replace(demo_recipe(words), image_root=located(f"{served.url}/lost"))
    served.fault = lambda number, key: ("status", 500.0) if key.endswith("jpg") else None
    with pytest.raises(UserError, match="gives no answer"):
        preprocess(open_job([located(f"{served.url}/lost/chat.jsonl")], recipe, tmp_path / "other"))
    assert not (tmp_path / "other").exists()


NAMES = {
    "s3://bucket/secret/a.jpg": "remote_image", "http://x.org/a.jpg": "remote_image", "../secret/a.jpg": "path_outside",
    "/secret/a.jpg": "path_outside", "memory://x/a.jpg": "remote_image", "cache::s3://bucket/secret/a.jpg": "missing",
    "S3://bucket/secret/a.jpg": "remote_image", "s3:///secret/a.jpg": "remote_image", "a\nb.jpg": "missing_image",
    "http://169.254.169.254/latest": "remote_image", "%2e%2e/secret/a.jpg": "path_outside", "a//../..//secret/a.jpg":
    "path_outside", "s3:/bucket/secret/a.jpg": "missing_image", "..\\secret\\a.jpg": "missing_image",
    "file:///etc/passwd": "path_outside", "//x.org/a.jpg": "path_outside", "concat:0.jpg|a.jpg": "missing_image",
    "\ud800.jpg": "malformed_line", "a?versionId=1": "missing_image", "\u202e.jpg": "missing_image",
}  # fmt: skip


def test_no_record_leads_out_of_the_root(words: Path, served: store.Store, tmp_path: Path) -> None:
    """Neither a line of JSON nor a cell of a table."""
    folder = served.root / "root"
    pictures(folder)
    pictures(served.root / "secret", count=1)
    written(folder / "chat.jsonl", *({"image": name, "conversations": SAID} for name in [*NAMES, "0.jpg"]))
    root = located(f"{served.url}/root")
    recipe = replace(demo_recipe(words), image_root=root)
    manifest = preprocess(open_job([root / "chat.jsonl"], recipe, tmp_path / "data"), max_rejects=len(NAMES))
    assert manifest["samples"] == 1
    found = [json.loads(line) for line in (tmp_path / "data/rejected.jsonl").read_text().splitlines()]
    assert len(found) == len(NAMES)
    assert all(one["reason"].startswith(reason) for one, reason in zip(found, NAMES.values(), strict=True))
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    named = [name for name in NAMES if name.isascii()]
    rows = [{"image": {"bytes": None, "path": name}, "conversations": SAID} for name in [*named, "0.jpg"]]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "set.parquet")
    manifest = preprocess(open_job([root / "set.parquet"], recipe, tmp_path / "table"), max_rejects=len(NAMES))
    assert manifest["samples"] == 1
    assert sum(manifest["rejected_by_reason"].values()) == len(named)
    assert all(re.match(r"GET /bucket(/root/|\?list-type=2&prefix=root%2F)", line) for line in served.seen)


@pytest.mark.parametrize(
    ("annotation", "root"),
    [
        ("inner/chat.jsonl", "inner"), ("/etc/passwd", "inner"), ("../lost/chat.jsonl", "inner"),
        ("inner/chat.jsonl", ".."), ("s3://bucket/secret/chat.jsonl", "inner"), ("inner/chat.jsonl", "s3://bucket/secret"),
        ("http://169.254.169.254/chat.jsonl", "inner"), ("inner/chat.jsonl", "cache::s3://bucket/secret"),
        ("inner/%2e%2e/%2e%2e/secret/chat.jsonl", "inner"),
    ],
)  # fmt: skip
def test_a_meta_file_of_a_store_names_what_is_beside_it(
    words: Path, served: store.Store, tmp_path: Path, annotation: str, root: str
) -> None:
    folder = served.root / "meta"
    if not folder.exists():
        pictures(folder / "inner")
    (folder / "meta.json").write_text(json.dumps({"one": {"annotation": annotation, "root": root}}))
    given = [located(f"{served.url}/meta/meta.json")]
    if (annotation, root) == ("inner/chat.jsonl", "inner"):
        assert preprocess(open_job(given, demo_recipe(words), tmp_path / "data"))["samples"] == COUNT
    else:
        with pytest.raises(UserError, match=r"leads out of|cannot be read|no such folder"):
            open_job(given, demo_recipe(words), tmp_path / "other")
    assert all(re.match(r"GET /bucket(/meta/|\?list-type=2&prefix=meta%2F)", line) for line in served.seen)


def test_a_dataset_moves_between_folder_and_store(words: Path, served: store.Store, tmp_path: Path) -> None:
    file = pictures(served.root / "moves")
    local, far = both(words, served, file, tmp_path)
    root = located(f"{served.url}/moves")
    for data, path in ((local, root / "chat.jsonl"), (far, file)):
        recipe = replace(demo_recipe(words, max_tiles=6), image_root=path.parent)
        preprocess(open_job([path], recipe, data.folder), max_rejects=0)
        moved = ChatDataset(data.folder)
        assert moved.sources.are_stored == isinstance(path, StorePath)
        for number in range(COUNT):
            assert np.array_equal(tiles_of(moved.sample(number)), tiles_of(local.sample(number)))
    (served.root / "moves/1.jpg").write_bytes(b"shorter")
    with pytest.raises(UserError, match="is not what was preprocessed: length 7"):
        tiles_of(ChatDataset(far.folder).sample(1))


class _ProfileNotFoundError(Exception):
    """As botocore's, which has no reply."""


_ProfileNotFoundError.__name__ = "ProfileNotFound"


def answered(status: int, code: str) -> Exception:
    """An error that has a store's answer."""
    error = OSError(f"{store.KEY} {store.SECRET}")
    error.__cause__ = Exception()
    error.__cause__.response = {"ResponseMetadata": {"HTTPStatusCode": status}, "Error": {"Code": code}}  # type: ignore[attr-defined]
    return error


CAUSES: dict[str, tuple[Exception, type[Exception], str, bool]] = {
    "profile": (_ProfileNotFoundError(store.KEY), StoreError, r"refuses the keys \(ProfileNotFound\)", False),
    "gone": (answered(404, "NoSuchKey"), FileNotFoundError, "no such object", False),
    "head": (answered(404, "404"), FileNotFoundError, "no such object", False),
    "like gone": (answered(404, "NoSuchKeyPair"), OSError, r"refuses it \(NoSuchKeyPair\)", False),
    "file": (FileNotFoundError(2, store.KEY), StoreError, r"cannot be asked \(FileNotFoundError", False),
    "bucket": (answered(404, "NoSuchBucket"), StoreError, "no such bucket", False),
    "late": (TimeoutError(), StoreError, r"no answer in 20 s; tried for 41 s", True),
    "many": (answered(429, "TooMany"), StoreError, r"no answer \(TooMany; tried for 41 s\)", True),
    "slow": (answered(503, "SlowDown"), StoreError, r"no answer \(SlowDown", True),
    "lost": (ConnectionResetError(), StoreError, r"no answer \(ConnectionResetError", True),
    "code": (TypeError(store.KEY), StoreError, r"cannot be asked \(TypeError\)", False),
    "value": (ValueError(store.KEY), StoreError, r"cannot be asked \(ValueError\)", False),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_named_and_tried_again_only_if_it_may_pass(name: str) -> None:
    error, kind, words, passes = CAUSES[name]
    path = located("s3://bucket/a.jpg")
    assert isinstance(path, StorePath)
    fault, again = stores._fault(path, error, 20.0, 41.2)
    assert type(fault) is kind
    assert re.search(words, str(fault))
    assert again == passes
    assert store.KEY not in str(fault)


@pytest.mark.parametrize("seed", range(3))
def test_tries_end_by_a_deadline_after_waits_that_grow_at_random(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A clock of our own: each try takes some seconds, none goes beyond the deadline, no two waits are alike."""
    draw, clock, waited = random.Random(seed), [0.0], list[float]()

    async def sleep(seconds: float) -> None:
        assert clock[0] < 9 * stores.PATIENCE, "tries that do not end"
        waited.append(seconds)
        clock[0] += seconds

    async def wait_for(work: Awaitable[None], limit: float) -> None:
        clock[0] += min(limit, draw.uniform(0, 5))
        await work

    async def fail() -> None:
        raise ConnectionResetError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(asyncio, "wait_for", wait_for)
    monkeypatch.setattr(stores, "monotonic", lambda: clock[0])
    path = located("s3://bucket/a.jpg")
    assert isinstance(path, StorePath)
    stores._gate.cache_clear()
    with pytest.raises(StoreError) as raised:
        asyncio.run(stores._tried(path, fail))
    stores._gate.cache_clear()
    stores._lost.clear()
    assert f"tried for {clock[0]:.2g} s" in str(raised.value)
    assert stores.PATIENCE - stores.LONGEST_WAIT <= clock[0] <= stores.PATIENCE
    assert len({*waited}) == len(waited) > 4
    limits = [min(stores.WAIT * 2**number, stores.LONGEST_WAIT) for number in range(len(waited))]
    assert all(limit / 2 <= wait <= limit for wait, limit in zip(waited, limits, strict=True))


def test_what_was_begun_before_a_fork_is_not_waited_for_after_it(served: store.Store) -> None:
    (served.root / "forked").write_bytes(b"abc")
    path = located(f"{served.url}/forked")
    assert isinstance(path, StorePath)
    served.delay = 0.3
    key = objects.begin(path, 0, 3)
    stores._lost.append(StoreError("the parent's"))
    assert key
    if not (child := os.fork()):
        signal.alarm(100)
        try:
            with open_plain(path, "") as file:
                stores.raise_if_lost()
                os._exit(0 if file.read() == b"abc" and not objects.in_flight() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert objects.in_flight() == 3
    objects.forget(key)
    stores._lost.clear()


def test_what_never_comes_is_not_waited_for_without_end(served: store.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = located(f"{served.url}/never")
    assert isinstance(path, StorePath)
    monkeypatch.setattr(stores, "LONGEST", 0.05)
    objects._begun[path, 0] = [Future()], 3
    with pytest.raises(StoreError, match="no answer in"):
        objects.ObjectFile(path)
    with pytest.raises(StoreError):
        stores.raise_if_lost()


def test_a_listing_has_its_limit_page_by_page(served: store.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of our own, on which nine pages take longer together than any request may."""
    folder = served.root / "pages"
    folder.mkdir(exist_ok=True)
    for number in range(9):
        (folder / f"{number}.parquet").write_bytes(b"a")
    call, clock, wait_for, limits = s3fs.S3FileSystem._call_s3, [0.0], asyncio.wait_for, list[float]()

    async def one_a_page(self: Any, method: str, **asked: Any) -> Any:
        clock[0] += stores.SECONDS / 2
        return await call(self, method, **({**asked, "MaxKeys": 1} if method.startswith("list") else asked))

    async def limited(work: Awaitable[Any], limit: float) -> Any:
        limits.append(limit)
        return await wait_for(work, limit)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", one_a_page)
    monkeypatch.setattr(stores, "monotonic", lambda: clock[0])
    monkeypatch.setattr(asyncio, "wait_for", limited)
    path = located(f"{served.url}/pages")
    assert [file.name for file in path.rglob("*")] == [f"{number}.parquet" for number in range(9)]
    assert limits == [stores.SECONDS] * 9
    assert clock[0] > stores.PATIENCE


def test_pages_that_repeat_and_keys_that_are_no_paths_end_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def lists(key: str, following: str | None) -> None:
        answer = Future[tuple[list[str], str | None]]()
        answer.set_result(([key], following))
        monkeypatch.setattr(stores, "_begin", lambda path, work: answer)

    path = located("s3://bucket/prefix")
    lists("prefix/a", "again")
    with pytest.raises(StoreError, match="the same page"):
        [*path.rglob("*")]
    for key in ("prefix/a::b", "prefix/a?b", "prefix//a", "prefix/../a", "other/a", "prefixed/a", "/etc/a", ""):
        lists(key, None)
        with pytest.raises(UserError, match="rename it"):
            [*path.rglob("*")]
    for key in ("prefix/a..b", "prefix/%2e%2e/a", "prefix/a b\u00e9"):
        lists(key, None)
        assert [found.key for found in path.rglob("*")] == [key]


ANSWERS = {
    "no range": ({"ContentLength": 9}, False),
    "whole": ({"ContentRange": "bytes 0-99/100", "ContentLength": 100}, False),
    "elsewhere": ({"ContentRange": "bytes 0-7/100", "ContentLength": 8}, False),
    "longer": ({"ContentRange": "bytes 4-11/100", "ContentLength": 10**12}, False),
    "no length": ({"ContentRange": "bytes 4-11/100"}, False), "text": ({"ContentRange": "bytes */100"}, False),
    "short": ({"ContentRange": "bytes 4-6/100", "ContentLength": 3}, False),
    "right": ({"ContentRange": "bytes 4-11/100", "ContentLength": 8}, True),
    "the end": ({"ContentRange": "bytes 4-8/9", "ContentLength": 5}, True),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_read_only_if_it_promises_what_was_asked_for(name: str) -> None:
    reply, is_read = ANSWERS[name]
    body = io.BytesIO(b"never read")
    path = located("s3://bucket/a")
    assert isinstance(path, StorePath)
    if is_read:
        assert stores._promised(path, {**reply, "Body": body}, 4, 8)[0] == reply["ContentLength"]
    else:
        with pytest.raises(StoreError, match="does not answer by ranges"):
            stores._promised(path, {**reply, "Body": body}, 4, 8)
    assert body.closed != is_read


class _Body(io.BytesIO):
    """An answer's bytes, as aiobotocore gives them."""

    async def __aenter__(self) -> "_Body":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def read(self) -> bytes:  # type: ignore[override]
        return self.getvalue()


@pytest.mark.parametrize("size", [0, 7, 9])
def test_an_answer_of_another_length_than_it_promises_is_no_answer(size: int) -> None:
    class Store:
        async def _call_s3(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {"ContentRange": "bytes 4-11/100", "ContentLength": 8, "ETag": "a", "Body": _Body(bytes(size))}

    path = located("s3://bucket/a")
    assert isinstance(path, StorePath)
    with pytest.raises(ConnectionError):
        asyncio.run(stores._range(Store(), path, 4, 8))


def test_parts_of_two_versions_are_never_joined(served: store.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is read on after it was changed, and where it changes between requests that were begun together."""
    versions, file = (bytes([number]) * 100_000 for number in (1, 2)), served.root / "versions"
    first, second = versions
    file.write_bytes(first)
    path = located(f"{served.url}/versions")
    assert isinstance(path, StorePath)
    with open_plain(path, "") as opened:
        assert opened.read(10) == first[:10]
        file.write_bytes(second)
        opened.seek(60_000)
        with pytest.raises(OSError, match="changed while it was read"):
            opened.read(10)
    monkeypatch.setattr(stores, "AT_ONCE", 1)
    monkeypatch.setattr(objects, "MOST_A_REQUEST", 40_000)
    stores._gate.cache_clear()
    begun = len(served.seen)
    served.fault = lambda number, key: file.write_bytes(first) and None if number == begun + 2 else None
    assert objects.begin(path, 0, len(second))
    with pytest.raises(OSError, match="changed while it was read"):
        open_regular(path)
    stores._gate.cache_clear()
    assert len(served.seen) == begun + 3


def test_no_log_has_what_signs_a_request(served: store.Store, caplog: pytest.LogCaptureFixture) -> None:
    (served.root / "logged").write_bytes(b"abc")
    for name in ("aiobotocore", "botocore", "fsspec", "s3fs"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    stores._settings.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()
    caplog.set_level(logging.DEBUG)
    with open_plain(located(f"{served.url}/logged"), "") as file:
        assert file.read() == b"abc"
    assert "AKIA" not in caplog.text
    assert "ignature" not in caplog.text


def test_a_bucket_is_a_prefix_and_no_object(served: store.Store) -> None:
    (served.root / "any").write_bytes(b"a")
    bucket = located(served.url)
    assert bucket.exists()
    assert bucket.is_dir()
    assert not bucket.is_file()
    assert len(served.seen) == 2
    with pytest.raises(UserError, match="no object"):
        open_plain(bucket, "name one")


def test_other_schemes_are_passed_on(words: Path, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    file = pictures(tmp_path / "files")
    memory = fsspec.filesystem("memory")
    for path in file.parent.iterdir():
        memory.pipe(f"/place/{path.name}", path.read_bytes())
    root = located("memory://place")
    recipe = replace(demo_recipe(words, max_tiles=6), image_root=root)
    preprocess(open_job([root / "chat.jsonl"], recipe, tmp_path / "data"), max_rejects=0)
    data = ChatDataset(tmp_path / "data")
    assert len(data) == COUNT
    tiles_of(data.sample(0))
    memory.pipe("/place/0.jpg", encoded(9, "JPEG"))
    with pytest.raises(UserError, match="is not what was preprocessed"):
        tiles_of(data.sample(0))
