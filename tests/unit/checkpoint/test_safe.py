"""No checkpoint runs code by being loaded, unless it is trusted; those of torch and Megatron load as they are."""

import io
import os
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.serialization import load_common_state_dict
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import WriteItemType

from megatron.vlm.checkpoint import safe
from megatron.vlm.checkpoint.safe import SaveReader, read_contents, read_weight, safe_unpickling
from omnibal_ext.errors import UserError
from tests.unit.checkpoint.programs import called, named


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with a tensor, half precision too, and an object."""
    tensors = {"one": torch.arange(6.0).view(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)}
    state = {**tensors, "object": {1, "b"}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "save"), no_dist=True)
    return tmp_path / "save"


def load(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = {"one": torch.zeros(2, 3), "half": torch.zeros(3, dtype=torch.bfloat16), "object": None}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def test_what_torch_writes_is_read(folder: Path) -> None:
    assert read_contents(folder / ".metadata").state_dict_metadata["one"].size == (2, 3)
    with safe_unpickling(trust=False):
        found = load(folder)
    assert (found["one"].tolist(), found["object"]) == ([[0, 1, 2], [3, 4, 5]], {1, "b"})


class Python3112(pickle.Pickler):
    """Writes members of enumerations as Python before 3.11.4 does."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented


def test_what_older_pythons_write_is_read(folder: Path) -> None:
    contents, file = read_contents(folder / ".metadata"), io.BytesIO()
    Python3112(file).dump(contents)
    (folder / ".metadata").write_bytes(file.getvalue())
    assert b"getattr" in file.getvalue()
    assert read_contents(folder / ".metadata") == contents


@pytest.mark.parametrize("of", [(WriteItemType, "mro"), (torch.Size, "count"), (WriteItemType.TENSOR, "name")])
def test_attributes_of_anything_else_are_refused(folder: Path, of: tuple[Any, str]) -> None:
    class Reaching:
        def __reduce__(self) -> Any:
            return getattr, of

    file = io.BytesIO()
    Python3112(file).dump(Reaching())
    (folder / ".metadata").write_bytes(file.getvalue())
    with pytest.raises(UserError, match="which no checkpoint needs"):
        read_contents(folder / ".metadata")


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_table_of_contents_that_runs_code_is_refused(folder: Path, tmp_path: Path, protocol: int) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran"), protocol))
    with pytest.raises(UserError, match=r"mkdir, which no checkpoint needs.*--trust"):
        read_contents(folder / ".metadata")
    with pytest.raises(UserError, match="--trust"), safe_unpickling(trust=False):
        load(folder)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(BaseException, match=r"metadata"), safe_unpickling(trust=True):
        load(folder)
    assert (tmp_path / "ran").exists()


def test_code_reached_through_a_module_that_is_allowed_is_refused(folder: Path, tmp_path: Path) -> None:
    """`filesystem` imports os: by its dotted name a pickle of protocol 4 could have it."""
    words = [b"torch.distributed.checkpoint.filesystem", b"os.mkdir", str(tmp_path / "ran").encode()]
    module, name, argument = (b"\x8c" + bytes([len(word)]) + word for word in words)
    (folder / ".metadata").write_bytes(b"\x80\x04" + module + name + b"\x93" + argument + b"\x85R.")
    with pytest.raises(UserError, match="no checkpoint needs"):
        read_contents(folder / ".metadata")
    assert not (tmp_path / "ran").exists()


def test_an_object_that_runs_code_is_refused(folder: Path, tmp_path: Path) -> None:
    dcp.save({"one": torch.zeros(2, 3), "half": torch.zeros(3), "object": Evil(tmp_path / "ran")},
             storage_writer=dcp.FileSystemWriter(tmp_path / "evil"), no_dist=True)  # fmt: skip
    with pytest.raises(UserError, match="cannot be loaded safely"), safe_unpickling(trust=False):
        load(tmp_path / "evil")
    assert not (tmp_path / "ran").exists()


def test_the_environment_cannot_let_code_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As core loads a file of its past: without a word on what may be unpickled."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with (tmp_path / "evil.pt").open("wb") as file:
        torch.save({"object": Evil(tmp_path / "ran")}, file)
    with safe_unpickling(trust=False), pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()
    with safe_unpickling(trust=True), pytest.warns(UserWarning, match="TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"):
        torch.load(tmp_path / "evil.pt")
    assert (tmp_path / "ran").exists()


def test_a_damaged_table_of_contents_is_refused_in_a_line(folder: Path) -> None:
    whole = (folder / ".metadata").read_bytes()
    for damaged in (b"", whole[:-5], whole[: len(whole) // 2], b"x" + whole, pickle.dumps({"not": "contents"})):
        (folder / ".metadata").write_bytes(damaged)
        with pytest.raises(UserError) as refused:
            read_contents(folder / ".metadata")
        assert "\n" not in str(refused.value)


def test_a_table_is_read_once_and_what_was_read_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may say another thing a moment later."""
    read = []

    def once(path: Path) -> Any:
        read.append(read_contents(path))
        path.write_bytes(b"something else")
        return read[-1]

    monkeypatch.setattr(safe, "read_contents", once)
    with safe_unpickling(trust=False):
        reader = dcp.FileSystemReader(folder)
        assert reader.read_metadata() is dcp.FileSystemReader(folder).read_metadata() is read[0]
        assert reader.read_metadata().storage_meta.load_id == reader.load_id
        assert load(folder)["one"].sum() == 15
    assert len(read) == 1


@pytest.mark.parametrize("first", [True, False])
def test_a_reader_that_keeps_tables_never_hands_one_load_anothers(folder: Path, first: bool) -> None:
    """Megatron keeps them by the folder's name, for the whole process."""

    def read() -> Any:
        return CachedMetadataFileSystemReader(folder).read_metadata()

    with safe_unpickling(trust=first):
        kept = read()
        assert read() is kept
    for trust in (not first, first):
        with safe_unpickling(trust):
            assert read() is not kept
    with safe_unpickling(trust=False):
        read()
    assert not CachedMetadataFileSystemReader._metadata_cache


def runs_first(path: Path, made: Path) -> None:
    """Have a table make a folder before it says what it said."""
    whole = path.read_bytes()
    path.write_bytes(whole[:2] + called(named("os", "mkdir"), str(made)) + b"0" + whole[2:])


def test_a_trusted_table_is_not_kept_for_a_load_that_trusts_nobody(folder: Path, tmp_path: Path) -> None:
    runs_first(folder / ".metadata", tmp_path / "ran")
    with safe_unpickling(trust=True):
        CachedMetadataFileSystemReader(folder).read_metadata()
    assert (tmp_path / "ran").exists()
    with pytest.raises(UserError, match="no checkpoint needs"), safe_unpickling(trust=False):
        CachedMetadataFileSystemReader(folder).read_metadata()


def test_a_refused_table_is_not_replaced_by_that_of_a_rank(folder: Path, tmp_path: Path) -> None:
    """Torch goes on with `__0.metadata` where it cannot read `.metadata`."""
    (folder / "__0.metadata").write_bytes((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(UserError, match="no checkpoint needs"), safe_unpickling(trust=False):
        load(folder)


def test_a_trusted_save_is_read_as_torch_reads_it(folder: Path, tmp_path: Path) -> None:
    runs_first(folder / ".metadata", tmp_path / "ran")
    with pytest.raises(UserError, match="--trust"):
        SaveReader(folder)
    assert not (tmp_path / "ran").exists()
    reader = SaveReader(folder, trust=True)
    assert read_weight(reader, "one", reader.contents.state_dict_metadata["one"]).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("content", ["code", "damage"])
def test_files_that_megatron_reads_itself_run_nothing_and_are_refused_in_a_line(tmp_path: Path, content: str) -> None:
    """common.pt, in which it kept what is no tensor."""
    torch.save({"iteration": Evil(tmp_path / "ran")}, tmp_path / "common.pt")
    if content == "damage":
        (tmp_path / "common.pt").write_bytes((tmp_path / "common.pt").read_bytes()[:-40])
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    with pytest.raises(UserError, match=r"cannot be loaded safely") as refused, safe_unpickling(trust=False):
        load_common_state_dict(str(tmp_path))
    assert str(refused.value).isprintable()
    assert not (tmp_path / "ran").exists()


def test_no_caller_can_ask_for_more_than_weights(tmp_path: Path) -> None:
    torch.save(Evil(tmp_path / "ran"), tmp_path / "evil.pt")
    for asked in ({"weights_only": False}, {"pickle_module": pickle, "weights_only": False}):
        with safe_unpickling(trust=False), pytest.raises(pickle.UnpicklingError):
            torch.load(tmp_path / "evil.pt", **asked)
    assert not (tmp_path / "ran").exists()
    assert torch.load.__module__ == "torch.serialization"
