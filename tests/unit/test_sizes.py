"""Sizes files: both formats read alike, faults are named with file and row."""

import json
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext import large_arrays
from omnibal_ext import sizes as sizes_module
from omnibal_ext.errors import UserError
from omnibal_ext.sizes import Sizes, load_columns, sizes_hash


def test_json_and_npz_are_one_corpus_in_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"vit_num": 3, "token_num": 800, "image_flags": 3}]))
    Sizes.from_arrays([0, 5], [20, 1300]).save(tmp_path / "b.npz")
    sizes = Sizes.load([tmp_path / "a.json", tmp_path / "b.npz"])
    assert (sizes.tiles.tolist(), sizes.tokens.tolist()) == ([3, 0, 5], [800, 20, 1300])
    assert (sizes.tiles.dtype, sizes.tokens.dtype) == (np.int32, np.int64)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"vit_num": 1, "token_num": 5}, {"vit_num": 1}]', "row 1"),
        ('[{"vit_num": 1, "token_num": 5}, {"vit_num": -1, "token_num": 5}]', r"row 1: tiles is -1"),
        ('[{"vit_num": 1, "token_num": 0}]', r"row 0: tokens is 0"),
        ('[{"vit_num": 1.5, "token_num": 3}]', "whole numbers"),
        ('[{"vit_num": null, "token_num": 3}]', "whole numbers"), ('[{"vit_num": [1], "token_num": 3}]', "sizes"),
        ('[{"vit_num": 99999999999999999999999, "token_num": 3}]', "whole numbers|32 bits"),
        ('{"vit_num": 1}', "list"), ("[1, 2]", "row 0"), ('[{"vit_num"', "not JSON"),
    ],
)  # fmt: skip
def test_a_fault_names_the_file_and_the_row(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        Sizes.load(path)
    assert str(path) in str(error.value)


def test_columns_are_read_from_both_formats(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"language": "de"}, {"language": "en"}, {}]))
    Sizes.from_arrays([0, 5], [20, 1300]).save(tmp_path / "b.npz", language=np.array(["de", "fr"]))
    assert list(load_columns(tmp_path / "b.npz", ["language"])[0]) == ["de", "fr"]
    with pytest.raises(UserError, match="row 2: must be an object with language"):
        load_columns(tmp_path / "a.json", ["language"])
    with pytest.raises(UserError, match="has no array 'task'"):
        load_columns(tmp_path / "b.npz", ["task"])


@pytest.mark.parametrize("name", ["absent.json", "absent.npz"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=name):
        Sizes.load(tmp_path / name)


def test_an_npz_of_something_else_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", tiles=np.ones(2, int))
    with pytest.raises(UserError, match="tokens"):
        Sizes.load(tmp_path / "x.npz")
    (tmp_path / "y.npz").write_bytes(b"PK not a zip")
    with pytest.raises(UserError, match=r"y\.npz"):
        Sizes.load(tmp_path / "y.npz")


def test_a_folder_of_arrays_is_read_as_an_npz_of_the_same(tmp_path: Path) -> None:
    columns = {"tiles": np.array([0, 3], np.int8), "tokens": np.array([20, 900], np.uint16), "language": ["de", "fr"]}
    np.savez(tmp_path / "a.npz", **columns)
    (tmp_path / "a").mkdir()
    for name, values in columns.items():
        np.save(tmp_path / "a" / f"{name}.npy", values)
    one, other = Sizes.load(tmp_path / "a", ("frames",)), Sizes.load(tmp_path / "a.npz", ("frames",))
    for size in ("tiles", "tokens", "frames"):
        assert one.of(size).dtype == other.of(size).dtype
        assert one.of(size).tolist() == other.of(size).tolist()
    assert load_columns(tmp_path / "a", ["language"])[0].tolist() == ["de", "fr"]
    hashed = sizes_hash(tmp_path / "a", ("tiles", "tokens"))
    np.save(tmp_path / "a/tiles.npy", np.array([0, 2], np.int8))
    assert sizes_hash(tmp_path / "a", ("tiles", "tokens")) != hashed
    hashed = sizes_hash(tmp_path / "a", ("tiles", "tokens"))
    np.save(tmp_path / "a/notes.npy", np.array([0, 2], np.int8))
    assert sizes_hash(tmp_path / "a", ("tiles", "tokens")) == hashed  # nothing reads it


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("tokens", [5, 0, 7], r"row 1: tokens is 0, must be 1 or more"), ("tiles", [0, 1, -2], r"row 2: tiles is -2"),
        ("tiles", [0, 1], r"tiles \(2,\) and tokens \(3,\)"), ("tokens", [5.0, 6.0, 7.0], "whole numbers"),
        ("frames", [1, 2], r"frames \(2,\) must be a list as long"), ("frames", [0, 0, 1 << 50], "row 2: frames"),
        ("tokens", [[5], [6], [7]], "one length"), ("tiles", ["0", "1", "2"], "whole numbers"),
    ],
)  # fmt: skip
def test_a_fault_of_a_folder_names_it_and_the_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, values: list[object], message: str, on_disk: bool
) -> None:
    monkeypatch.setattr(sizes_module, "MAPPED", 1)
    monkeypatch.setattr(large_arrays, "PIECE", 2)
    monkeypatch.setattr(sizes_module, "PIECE", 2)
    for column, ours in {"tiles": [0, 1, 2], "tokens": [5, 6, 7], "frames": [0, 0, 0], name: values}.items():
        np.save(tmp_path / f"{column}.npy", np.array(ours))
    with pytest.raises(UserError, match=message) as error:
        Sizes.load(tmp_path, ("frames",), on_disk)
    assert str(tmp_path) in str(error.value)


def test_a_value_that_is_no_list_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.array([5, 6]))
    np.save(tmp_path / "tiles.npy", np.array(1))
    with pytest.raises(UserError, match=r"tiles must be a list, a value for each sample, found \(\)"):
        Sizes.load(tmp_path)


def test_a_damaged_array_of_a_folder_is_named(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.array([5, 6]))
    (tmp_path / "tiles.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(UserError, match=r"tiles\.npy: is no \.npy file, or damaged"):
        Sizes.load(tmp_path)


@pytest.mark.parametrize(("tiles", "tokens"), [("u1", "i2"), ("u8", "u8"), (">u8", ">i4")])
def test_folders_and_files_are_one_corpus_which_stays_on_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiles: str, tokens: str
) -> None:
    """An array in memory among those on disk goes there, too; none becomes floats. Absent columns take no memory."""
    monkeypatch.setattr(sizes_module, "MAPPED", 1)
    monkeypatch.setattr(large_arrays, "PIECE", 2)
    Sizes.from_arrays([7], [70_000]).save(tmp_path / "b.npz")
    (tmp_path / "a").mkdir()
    np.save(tmp_path / "a/tiles.npy", np.array([0, 3, 1], tiles))
    np.save(tmp_path / "a/tokens.npy", np.array([20, 900, 40], tokens))
    sizes = Sizes.load([tmp_path / "a", tmp_path / "b.npz"], on_disk=True)
    assert isinstance(sizes.tokens, np.memmap)
    assert sizes.tokens.dtype.kind == "i"
    assert np.concatenate([sizes.tiles, np.zeros(1, np.int64)]).dtype.kind == "i"
    frames = Sizes.load([tmp_path / "a", tmp_path / "a"], ["frames"], on_disk=True).more["frames"]
    assert (len(frames), frames.strides) == (6, (0,))
    assert (sizes.tiles.tolist(), sizes.tokens.tolist()) == ([0, 3, 1, 7], [20, 900, 40, 70_000])
    assert (sizes.total("tokens"), sizes.most("tokens"), sizes.most("tiles")) == (70_960, 70_000, 7)
    taken = sizes.take(np.array([3, 0, 3]))
    assert (taken.tokens.dtype, taken.tokens.tolist()) == (np.int64, [70_000, 20, 70_000])
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b.npz"}
