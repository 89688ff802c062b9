"""A dataset's folder may be a stranger's: what its files name is asked only if the command line names it too."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.loader import Needs, PackDataset, microbatches
from megatron.vlm.data.moved import note_moved
from megatron.vlm.data.rejects import RejectCount
from megatron.vlm.hf.check_samples import samples_of
from omnibal_ext.errors import UserError
from omnibal_ext.files.records import write_record
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.reading import stores
from omnibal_ext.reading.document import sealed
from omnibal_ext.reading.stores import StoreError, located
from tests.demo import demo_dataset, demo_packs

FOREIGN = ("http://host.example/data", "hf://datasets/owner/name", "s3://theirs/data", "file://host/data", "s3://mine-/x",
           "memory://theirs/data", "github://owner:name@main/x", "s3://mine/../theirs/data", "s3://mine/a/../../theirs",
           "S3://mine/data", "simplecache::s3://mine/data", "s3://mine/zip::http://host.example", "s3://mine?x=/data",
           "s3://169.254.169.254/latest", "abfs://mine@host.example/data", "s3://./theirs")  # fmt: skip


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The stores that were asked for anything; none answers. The command line named one, s3://mine."""
    found: list[str] = []

    def ask(path: stores.StorePath) -> None:
        found.append(path.store)
        raise StoreError("asked")

    monkeypatch.setattr(stores, "_named", set())
    monkeypatch.setattr(stores, "_store", ask)
    stores.head.cache_clear()
    located("s3://mine/chat.jsonl")
    yield found
    stores._lost.clear()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> ChatDataset:
    folder = tmp_path_factory.mktemp("made")
    return demo_dataset(folder / "raw", folder / "data", 4, max_tiles=6)


def changed(data: ChatDataset, by: str, place: str) -> None:
    """Have the manifest, or moved.json, name other places."""
    where = {"path": f"{place}/chat.jsonl", "image_root": place}
    if by == "moved.json":
        note_moved(data.folder, [where])
    else:
        manifest = {name: value for name, value in data.manifest.items() if name != "manifest_hash"}
        sources = [{**source, **where} for source in manifest["sources"]]
        write_record(data.folder / "manifest.json", sealed({**manifest, "sources": sources}))


def read_all(folder: Path) -> None:
    """Read all packs as training does."""
    data = ChatDataset(folder)
    index = demo_packs(data, folder.with_name("packs"), PackOptions(vit_budget=30, llm_budget=400))
    packs = PackDataset(data, index, Needs(frozenset({"tiles"}), tokens=True, labels=True))
    [*microbatches(packs, range(index.num_packs))]


@pytest.mark.parametrize("by", ["manifest.json", "moved.json"])
@pytest.mark.parametrize("place", FOREIGN)
def test_no_dataset_makes_its_reader_ask_a_host(
    made: ChatDataset, tmp_path: Path, asked: list[str], by: str, place: str
) -> None:
    data = copied(made, tmp_path)
    changed(data, by, place)
    opened = ChatDataset(data.folder)
    number = next(number for number in range(len(opened)) if opened.sample(number).images)
    for read in (
        lambda: read_all(data.folder), lambda: samples_of(data.folder), opened.sources.refuse_foreign,
        lambda: opened[number], lambda: pickle.loads(pickle.dumps(opened))[number],
    ):  # fmt: skip
        with pytest.raises(UserError, match=r"named by a file|is no object store|must be SCHEME") as refused:
            read()
        assert "\n" not in str(refused.value)
    assert not asked


def test_the_users_own_store_is_asked_also_by_data_workers(
    made: ChatDataset, tmp_path: Path, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = copied(made, tmp_path)
    changed(data, "moved.json", "s3://mine/images")
    opened = ChatDataset(data.folder)
    opened.sources.refuse_foreign()
    monkeypatch.setattr(stores, "_named", set())  # a forkserver's worker has no command line
    worker = pickle.loads(pickle.dumps(opened))
    number = next(number for number in range(len(worker)) if worker.sample(number).images)
    with pytest.raises(UserError, match="asked"):
        worker[number]
    assert set(asked) == {"s3://mine"}


@pytest.mark.parametrize("place", FOREIGN)
def test_no_list_of_rejected_lines_makes_its_reader_ask_a_host(tmp_path: Path, asked: list[str], place: str) -> None:
    row = {"file": f"{place}/list.json", "line": 3, "reason": "missing_image", "detail": "a.jpg"}
    (tmp_path / "rejected.jsonl").write_text(json.dumps(row))
    said = RejectCount.of_file(tmp_path / "rejected.jsonl").describe()
    assert f"{place}/list.json line 3" in said
    assert not asked


def copied(data: ChatDataset, folder: Path) -> ChatDataset:
    """A dataset's folder that may be changed."""
    for path in data.folder.iterdir():
        if path.is_file():
            (folder / "data").mkdir(exist_ok=True)
            (folder / "data" / path.name).write_bytes(path.read_bytes())
    return ChatDataset(folder / "data")
