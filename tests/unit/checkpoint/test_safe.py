"""No checkpoint runs code by being loaded, unless it is trusted; those of torch and Megatron load as they are."""

import io
import os
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.planner import WriteItemType

from megatron.vlm.checkpoint.safe import read_contents, safe_unpickling
from omnibal_ext.errors import UserError


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
