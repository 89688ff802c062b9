"""Sizes files: both formats read alike, faults are named with file and row."""

import json
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.sizes import Sizes, load_columns


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
