"""A store is named by its user alone, without keys, and only for what is read; its path leads nowhere but below."""

import json
import pickle
from copy import deepcopy
from pathlib import Path

import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.launch.recipe import with_recipe
from omnibal_ext.preprocess_flags import preprocess_parser
from omnibal_ext.reading.stores import StorePath, located

PATH = "s3://bucket/some/chat.jsonl"


def test_a_store_is_a_path_to_those_who_read() -> None:
    path = located(PATH)
    assert isinstance(path, StorePath)
    assert (str(path), path.name, path.suffix, path.bucket, path.key) == (
        PATH, "chat.jsonl", ".jsonl", "bucket", "some/chat.jsonl",
    )  # fmt: skip
    assert str(path.parent / "a/b.png") == "s3://bucket/some/a/b.png"
    assert str(path.parent.parent) == "s3://bucket"
    for same in (pickle.loads(pickle.dumps(path)), deepcopy(path), located(str(path)), path.resolve(), path.absolute()):
        assert (type(same), str(same), hash(same)) == (StorePath, PATH, hash(path))


@pytest.mark.parametrize("name", ["a.jsonl", "/a/b.jsonl", "../a", "s3:/bucket/a", "a/s3://b", "C:\\a::b", "a::b"])
def test_what_has_no_scheme_is_a_file(name: str) -> None:
    assert type(located(name)) is type(Path(name))
    assert located(name) == Path(name)


WRONG = ("simplecache::s3://bucket/a", "s3://bucket::zip://a", "s3://KEY:WORD@bucket/a", "https://x.org/a?sig=WORD",
         "s3://", "s3:///a", "1s://b/c")  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_chains_and_keys_are_refused_and_not_repeated(name: str) -> None:
    with pytest.raises(UserError) as refused:
        located(name)
    assert "WORD" not in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["/etc/passwd", "../other", "a/../../other", ".."])
def test_no_name_leads_out_of_a_store(name: str) -> None:
    with pytest.raises(UserError, match="leads out of s3://bucket/root"):
        located("s3://bucket/root") / name


def test_only_what_is_read_may_name_a_store(tmp_path: Path) -> None:
    words = ["--input", "s3://bucket/a.jsonl", "--image-root", "s3://bucket/images", "--output-dir", str(tmp_path)]
    parser = preprocess_parser(None)
    found = parser.parse_args(words)
    assert [type(one) for one in (*found.input, found.image_root)] == [StorePath, StorePath]
    with pytest.raises(UserError, match=r"--output-dir .* stay on a file system"):
        parser.parse_args([*words[:-1], "s3://bucket/data"])
    with pytest.raises(UserError, match=r"--tokenizer-model .* stay on a file system"):
        parser.parse_args([*words, "--tokenizer-model", "gs://bucket/tokenizer.json"])


def test_no_recipe_names_a_store(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"flags": {"input": [PATH], "image-root": "images"}}))
    with pytest.raises(UserError, match=r"flags\.input names a store"):
        with_recipe(["--config", str(path)])
    assert PATH in with_recipe(["--config", str(path), "--input", PATH])
