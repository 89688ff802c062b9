"""Whatever file a conversation comes in, the model reads the same; what is damaged is named; no name leads outside."""

import base64
import codecs
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.demo.data import make_demo_data
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.preprocessing.inputs import read_inputs
from megatron.vlm.preprocessing.job import open_job
from megatron.vlm.preprocessing.preprocess import preprocess
from omnibal_ext.errors import UserError
from omnibal_ext.packing.corpus import Corpus
from tests.demo import demo_recipe
from tests.media import tiles_of
from tests.unit.data.clips import tar_of

pyarrow = pytest.importorskip("pyarrow")
SAMPLES = 30
Record = dict[str, Any]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    make_demo_data(folder, samples=SAMPLES, heldout_samples=1, seed=7)
    return folder


def records(raw: Path) -> list[Record]:
    found = [json.loads(line) for line in (raw / "train.jsonl").read_text().splitlines()]
    found[3]["conversations"][-1]["value"] += " é 你"  # more bytes than characters
    return found


def paths(record: Record) -> list[str]:
    image = record.get("image") or []
    return image if isinstance(image, list) else [image]


def made(raw: Path, inputs: list[Path], output: Path, root: Path | None, **flags: Any) -> ChatDataset:
    recipe = replace(demo_recipe(raw), image_root=root)
    preprocess(open_job(inputs, recipe, output, lines_per_part=7), max_rejects=flags.get("max_rejects", 0))
    return ChatDataset(output)


def text(*values: Any, indent: int | None = None) -> str:
    return "".join(json.dumps(value, indent=indent, ensure_ascii=False) + "\n" for value in values)


def lines(raw: Path, folder: Path) -> Path:
    (folder / "chat.jsonl").write_text(text(*records(raw)))
    return folder / "chat.jsonl"


def llava_list(raw: Path, folder: Path) -> Path:
    (folder / "chat.json").write_text(text(records(raw), indent=1))
    return folder / "chat.json"


def meta_of_all(raw: Path, folder: Path) -> Path:
    (folder / "meta.json").write_text(text({"all": {"root": str(raw), "annotation": str(lines(raw, folder))}}))
    return folder / "meta.json"


def marked(written: Path) -> Path:
    """A mark of the byte order before each half, as where two files of Windows were joined."""
    whole = written.read_bytes()
    half = whole.index(b"\n", len(whole) // 2) + 1 if written.suffix == ".jsonl" else len(whole)
    parts = [b"\r\n", whole[:half], whole[half:]] if written.suffix == ".jsonl" else [whole]
    written.write_bytes(b"".join(codecs.BOM_UTF8 + part for part in parts))
    return written


def openai(raw: Path, folder: Path, inside: bool) -> Path:
    """Parts of a message, with images as paths or inside: every mark of the demo stands in front of the words."""

    def image(path: str) -> Record:
        coded = f"data:image/png;base64,{base64.b64encode((raw / path).read_bytes()).decode()}"
        return {"type": "image_url", "image_url": {"url": coded if inside else f"file://{raw / path}"}}

    rows = []
    for record in records(raw):
        left, messages = iter(paths(record)), []
        for turn in record["conversations"]:
            words = turn["value"]
            parts = [image(next(left)) for _ in range(words.count("<image>"))]
            parts.append({"type": "text", "text": words.replace("<image>\n", "").replace("<image>", "")})
            messages.append({"role": ROLES[turn["from"]], "content": parts if len(parts) > 1 else parts[0]["text"]})
        rows.append({"messages": messages})
    (folder / "openai.jsonl").write_text(text(*rows))
    return folder / "openai.jsonl"


ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def sharegpt(raw: Path, folder: Path, whole_paths: bool) -> Path:
    rows = [
        {"messages": [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in record["conversations"]],
         "images": [str(raw / name) if whole_paths else name for name in paths(record)]} for record in records(raw)
    ]  # fmt: skip
    path = folder / f"sharegpt.json{'l' * whole_paths}"
    path.write_text(text(*rows) if whole_paths else text(rows))
    return path


def columns(raw: Path, inside: bool) -> Any:
    def cell(path: str) -> Record:
        return {"bytes": (raw / path).read_bytes() if inside else None, "path": path}

    found = records(raw)
    turns = [[{"from": t["from"], "value": t["value"]} for t in record["conversations"]] for record in found]
    return pyarrow.table({"conversations": turns, "images": [list(map(cell, paths(record))) for record in found]})


def parquet(raw: Path, folder: Path, inside: bool) -> Path:
    import pyarrow.parquet

    (folder / "set").mkdir()
    table = columns(raw, inside)
    for part, (first, count) in enumerate(((0, 17), (17, SAMPLES))):
        pyarrow.parquet.write_table(table.slice(first, count), folder / f"set/{part}.parquet", row_group_size=5)
    return folder / "set"


def arrow(raw: Path, folder: Path) -> Path:
    table = columns(raw, inside=True)
    with pyarrow.OSFile(str(folder / "data.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    return folder / "data.arrow"


def web_tar(raw: Path, folder: Path, mark: bytes = b"", turns_alone: bool = False) -> Path:
    """The turns alone, as Megatron-LM's conversion of LLaVA's data writes them, or all that is said."""
    members = []
    for number, record in enumerate(records(raw)):
        said = {key: value for key, value in record.items() if key != "image"}
        members += [(f"{number:04d}.json", mark + text(said["conversations"] if turns_alone else said).encode())]
        images = enumerate(paths(record))
        members += [(f"{number:04d}.{place}.png", (raw / name).read_bytes()) for place, name in images]
    return tar_of(folder / "shard.tar", *members)


FORMATS: dict[str, Callable[[Path, Path], Path]] = {
    "a list": llava_list,
    **{f"messages with images {'inside' if inside else 'as paths'}": partial(openai, inside=inside)
       for inside in (False, True)},
    **{f"messages beside {'whole ' * whole}paths": partial(sharegpt, whole_paths=whole) for whole in (False, True)},
    **{f"parquet of {'images' if inside else 'paths'}": partial(parquet, inside=inside) for inside in (False, True)},
    "arrow": arrow, "tar": web_tar, "tar of turns alone": partial(web_tar, turns_alone=True),
    "tar with marks": partial(web_tar, mark=codecs.BOM_UTF8),
    "lines with marks": lambda raw, folder: marked(openai(raw, folder, inside=True)),
    "a list with a mark": lambda raw, folder: marked(llava_list(raw, folder)),
    "a meta file with a mark": lambda raw, folder: marked(meta_of_all(raw, folder)),
}  # fmt: skip


@pytest.mark.parametrize("written", FORMATS.values(), ids=FORMATS)
def test_every_format_makes_what_lines_make(raw: Path, tmp_path: Path, written: Callable[[Path, Path], Path]) -> None:
    wanted = made(raw, [lines(raw, tmp_path)], tmp_path / "wanted", raw)
    found = made(raw, [written(raw, tmp_path)], tmp_path / "found", raw)
    assert len(found) == SAMPLES
    for name in ("tokens.bin", "loss_mask.bin"):
        assert (found.folder / name).read_bytes() == (wanted.folder / name).read_bytes()
    assert found.sizes.tiles.tolist() == wanted.sizes.tiles.tolist()
    for sample in range(SAMPLES):
        np.testing.assert_array_equal(tiles_of(found.sample(sample)), tiles_of(wanted.sample(sample)))


def meta(raw: Path, folder: Path, **changed: Any) -> Path:
    lines(raw, folder)
    sets = {
        "first": {"root": str(raw), "annotation": "chat.jsonl", "repeat_time": 2, "max_dynamic_patch": 32, "length": 3},
        "second": {"root": str(raw), "annotation": str(llava_list(raw, folder)), "repeat_time": 0.5,
                   "data_augment": False, **changed},
    }  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(sets))
    return folder / "meta.json"


def test_a_meta_file_is_its_sets_each_with_root_limit_and_weight(raw: Path, tmp_path: Path) -> None:
    """A limit of a set counts for its own conversations alone."""
    data = made(raw, [meta(raw, tmp_path, max_dynamic_patch=1)], tmp_path / "data", None)
    assert len(data) == 2 * SAMPLES
    assert [source["weight"] for source in data.manifest["sources"]] == [2.0, 0.5]
    assert [source.weight for source in Corpus.of_dataset(data.folder).sources] == [2.0, 0.5]
    images = [len(paths(record)) for record in records(raw)]
    assert data.sizes.tiles[SAMPLES:].tolist() == images  # a tile each
    assert data.sizes.tiles[:SAMPLES].sum() > sum(images)
    assert {part.max_tiles for file in read_inputs([tmp_path / "meta.json"]) for part in file.parts} == {32, 1}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"annotation": None}, "set 'second': has no 'annotation'"),
        ({"data_augment": True}, "'data_augment' changes images"),
        *[
            ({"repeat_time": times}, "meta.json: set 'second': repeat_time is .*, must be a number above 0 and at most")
            for times in (0, -1, math.inf, -math.inf, math.nan, 1e7, True, "2", None)
        ],
        ({"max_dynamic_patch": "6"}, "max_dynamic_patch is '6'"),
        ({"crop": True}, "field 'crop' is not known"),
        ({"root": "/nowhere"}, "/nowhere: no such folder"),
        ({"annotation": "nowhere.jsonl"}, "nowhere.jsonl: cannot be read"),
        ({"annotation": "meta.json"}, "is a meta file itself"),
    ],
)
def test_a_set_that_cannot_be_honoured_is_refused(raw: Path, tmp_path: Path, changed: Record, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_inputs([meta(raw, tmp_path, **changed)])


def reasons(raw: Path, path: Path, folder: Path) -> list[str]:
    """One good conversation goes along: a dataset of none is refused."""
    data = made(raw, [raw / "train.jsonl", path], folder / "data", raw, max_rejects=99)
    rows = [json.loads(line) for line in (data.folder / "rejected.jsonl").read_text().splitlines()]
    assert {row["file"] for row in rows} <= {str(path)}
    return [row["reason"] for row in rows]


SAID = {"role": "assistant", "content": "A cat."}


def asked(*parts: Any, **fields: Any) -> Record:
    return {"messages": [{"role": "user", "content": list(parts)}, SAID], **fields}


IMAGE, TEXT = {"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (asked({"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}, TEXT), "remote_image"),
        (asked({"type": "image", "image": "file:///etc/passwd"}, TEXT), "path_outside_root"),
        (asked({"type": "image", "image": "../a.png"}, TEXT), "path_outside_root"),
        (asked({"type": "image_url", "image_url": "data:image/png;base64,!!!!"}, TEXT), "unreadable_image"),
        (asked({"type": "image_url", "image_url": "data:image/png,abc"}, TEXT), "unreadable_image"),
        (asked({"type": "image_url", "image_url": "data:image/png;base64,aGVsbG8="}, TEXT), "not_an_image"),
        (asked({"type": "text", "text": "<image>"}, images=["a.png"]), "image_mark_mismatch"),
        (asked(IMAGE, TEXT, images=["a.png"]), "malformed_line"),
        (asked({"type": "image"}, TEXT), "image_mark_mismatch"),
        (asked({"type": "video", "video": "a.mp4"}), "unsupported_media"),
        (asked("What?"), "malformed_line"),
        (asked(TEXT, conversations=[]), "malformed_line"),
        ({"messages": [{"role": "user", "content": None}, SAID]}, "malformed_line"),
        ({"messages": [{"role": "tool", "content": "x"}, SAID]}, "bad_roles"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}, SAID]}, "unsupported_field"),
    ],
)
def test_a_bad_message_is_a_reject_with_its_reason(raw: Path, tmp_path: Path, record: Record, reason: str) -> None:
    (tmp_path / "bad.json").write_text(json.dumps([record]))
    assert reasons(raw, tmp_path / "bad.json", tmp_path) == [reason]


def test_an_image_that_names_no_file_is_one_of_images_beside(raw: Path, tmp_path: Path) -> None:
    picture = next(path for record in records(raw) for path in paths(record))
    (tmp_path / "chat.json").write_text(json.dumps([asked({"type": "image"}, TEXT, images=[picture])]))
    assert reasons(raw, tmp_path / "chat.json", tmp_path) == []


def test_tars_do_not_reach_out_and_say_what_is_wrong(raw: Path, tmp_path: Path) -> None:
    picture = next(path for record in records(raw) for path in paths(record))
    content, said = (raw / picture).read_bytes(), json.dumps(asked({"type": "image", "image": "png"}, TEXT)).encode()
    path = tar_of(
        tmp_path / "t.tar", ("a.json", said), ("a.png", content), ("../b.json", said), ("/c.json", said),
        ("d.png", content), ("d.txt", b"A cat."), ("e.json", b"{"), ("f.json", said), ("f.png", content[:50]),
        ("g.json", said), ("g.txt", b""),
    )  # fmt: skip
    found = reasons(raw, path, tmp_path)
    assert found == ["path_outside_root", "path_outside_root", "malformed_line", "malformed_line", "truncated_image",
                     "missing_image"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"messages": []}, {"mess', "is no JSON list to its end"),
        ("a.json", b"[1, 2", "is no JSON list to its end"),
        ("a.parquet", b"PAR1 nothing", "is no whole parquet file"),
        ("a.arrow", b"nothing", "is no whole arrow file"),
        ("a.tar", b"nothing at all" * 90, "is no whole tar"),
        ("a.jsonl", '{"messages": []}\n'.encode("utf-16"), "is written in UTF-16"),
        ("a.json", "[{}]".encode("utf-16"), "is written in UTF-16"),
        ("folder/a.txt", b"", "no .parquet and no .arrow files here"),
        ("folder/dataset_dict.json", b'{"splits": ["train", "test"]}', "has the splits train, test"),
    ],
)
def test_a_damaged_file_is_refused_whole(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_inputs([path if path.parent == tmp_path else path.parent])
    assert "\n" not in str(error.value)


def test_splits_in_one_folder_are_not_read_as_one(tmp_path: Path) -> None:
    import pyarrow.parquet

    (tmp_path / "data").mkdir()
    for split in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        pyarrow.parquet.write_table(pyarrow.table({"messages": [[]]}), tmp_path / f"data/{split}.parquet")
    with pytest.raises(UserError, match="has files of the splits test, train; name those of one of them"):
        read_inputs([tmp_path])
    (tmp_path / "data/test-00000-of-00001.parquet").unlink()
    assert [file.path.name for file in read_inputs([tmp_path])] == [
        "train-00000-of-00002.parquet", "train-00001-of-00002.parquet"
    ]  # fmt: skip


def test_a_tar_cut_off_and_a_table_without_the_column_are_refused(raw: Path, tmp_path: Path) -> None:
    path = web_tar(raw, tmp_path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3 // 512 * 512 + 100])
    with pytest.raises(UserError, match=r"shard\.tar: (ends inside|is no whole tar)"):
        read_inputs([path])
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"], "image": [None]}), tmp_path / "t.parquet")
    with pytest.raises(UserError, match="has no column 'conversations' or 'messages'; it has text, image"):
        read_inputs([tmp_path / "t.parquet"])
