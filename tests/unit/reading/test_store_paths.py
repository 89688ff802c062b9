"""A store is named by its user alone, without keys, and only for what is read; its path leads nowhere but below."""

import json
import pickle
from argparse import ArgumentParser, Namespace
from copy import deepcopy
from pathlib import Path

import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.launch import conversations
from omnibal_ext.launch.conversations import check_paths
from omnibal_ext.launch.recipe import recipe_of, with_recipe
from omnibal_ext.preprocess_flags import preprocess_parser
from omnibal_ext.reading import stores
from omnibal_ext.reading.stores import SCHEMES, StorePath, located, named_stores
from omnibal_ext.trainer_flags import TRAINER_FLAGS

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


WRONG = ("simplecache::s3://bucket/a", "s3://bucket::zip://a", "s3://KEY:WORD@bucket/a", "s3://KEY:WORD/a",
         "s3://bucket/a?sig=WORD", "s3://", "s3:///a", "1s://b/c", "WORD:x://b", "s3://buck et/a",
         "s3://bucket/../WORD/a", "s3://../WORD", "s3://bucket/..", "abfs://bucket@host.example/a")  # fmt: skip


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
    with pytest.raises(UserError, match=r"--output-dir s3://\.\.\.: ") as refused:
        parser.parse_args([*words[:-1], "s3://KEY:SECRET@bucket/data"])
    assert "KEY" not in str(refused.value)
    text = "https://a.org is ours"
    assert parser.parse_args([*words, "--system-message", text]).system_message == text


@pytest.mark.parametrize("scheme", ["http", "https", "ftp", "file", "local", "dir", "reference", "github", "hf", "ssh"])
def test_what_is_no_object_store_is_refused_in_a_line(scheme: str) -> None:
    with pytest.raises(UserError, match=rf"{scheme}://\.\.\.: is no object store") as refused:
        located(f"{scheme}://bucket/WORD")
    assert "WORD" not in str(refused.value)
    assert len(refused.value.lines) == 1
    for known in SCHEMES:
        assert isinstance(located(f"{known}://bucket/a"), StorePath)


def test_the_trainers_stores_are_the_command_lines_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "_named", set())
    parser = ArgumentParser()
    TRAINER_FLAGS["where images may lie"](parser)
    assert parser.parse_args([]).stores is None
    assert not named_stores()
    given = parser.parse_args(["--stores", "s3://one", "gs://two", "--stores", "s3://three/below"]).stores
    assert given == ["s3://one", "gs://two", "s3://three/below"]
    assert named_stores() == {"s3://one", "gs://two", "s3://three"}
    with pytest.raises(UserError, match="is no store"):
        parser.parse_args(["--stores", "folder"])
    for recipe in (
        {"flags": {"stores": ["s3://bucket"]}}, {"flags": {}, "megatron": ["--stores", "s3://bucket"]},
        {"flags": {}, "megatron": ["--stores=s3://bucket"]}, {"flags": {"stores": ["one"]}},
    ):  # fmt: skip
        (tmp_path / "recipe.json").write_text(json.dumps(recipe))
        with pytest.raises(UserError, match="no file may"):
            with_recipe(["--config", str(tmp_path / "recipe.json")])
    assert "stores" not in recipe_of(["--stores", "s3://bucket", "--lr", "1"])["flags"]


def test_the_launcher_gives_the_trainer_the_stores_of_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "check_exists", lambda path: None)
    monkeypatch.setattr(conversations, "refuse_no_images", lambda path: None)
    for inputs, root, stores_given in (
        ([PATH], None, ["--stores=s3://bucket"]), (["a.jsonl"], "images", []), (None, None, []),
        ([PATH, "a.jsonl"], "s3://other/images", ["--stores=s3://bucket", "--stores=s3://other"]),
    ):  # fmt: skip
        monkeypatch.setattr(stores, "_named", set())
        paths, images = inputs and [*map(located, inputs)], root and located(root)
        given = Namespace(run_dir=tmp_path / "run", input=paths, image_root=images, megatron=["--lr", "1"])
        check_paths(given)
        assert given.megatron == ["--lr", "1", *stores_given]


def test_no_recipe_names_a_store(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"flags": {"input": [PATH], "image-root": "images"}}))
    with pytest.raises(UserError, match=r"flags\.input names a store"):
        with_recipe(["--config", str(path)])
    assert PATH in with_recipe(["--config", str(path), "--input", PATH])
