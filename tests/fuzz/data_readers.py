"""Readers of what preprocessing is given and keeps: input files of every format, meta files, notes and parts."""

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from megatron.vlm.data.formats import json_list, lines, table, tar
from megatron.vlm.data.formats.places import open_place
from megatron.vlm.data.formats.rows import InputFile, PartSource
from megatron.vlm.preprocessing.inputs import read_inputs
from megatron.vlm.preprocessing.parts import PreparedPart, prepare_part
from omnibal_ext.reading.memory import work_apart
from tests.demo import demo_recipe, turns
from tests.fuzz.reader import Files, Reader

SAID = [{"id": n, "conversations": turns("What?", "A cat. " * n), "image": f"{n}.png"} for n in range(1, 6)]
LONG = [{**one, "conversations": turns("What? " * 300, "A cat. " * 300)} for one in SAID]
"""In tables, so that there is more of them than of what they say of themselves."""
LINES = [json.dumps(one).encode() for one in SAID]


def data_readers(folder: Path) -> dict[str, Reader]:
    """Each by its name; whole files are made in the folder."""
    return {
        "lines": _cut({"chat.jsonl": b"\n".join(LINES)}, lines.cut, lines.rows),
        "json list": _cut({"chat.json": b"[" + b",\n".join(LINES) + b"]"}, json_list.cut, json_list.rows),
        "tar": _cut({"pax.tar": _tar(tarfile.PAX_FORMAT), "gnu.tar": _tar(tarfile.GNU_FORMAT)}, tar.cut, tar.rows),
        "parquet": _table("a.parquet", _parquet()), "arrow": _table("a.arrow", _arrow(pyarrow.ipc.new_file)),
        "arrow stream": _table("a.arrow", _arrow(pyarrow.ipc.new_stream)),
        "meta": _meta(), "dataset_dict": _dataset_dict(), "note": _note(folder / "notes"),
        "part": _part(folder / "part"),
    }  # fmt: skip


def _cut(files: Files, cut: Callable[[Path, int], InputFile], rows: Callable[[PartSource], Any]) -> Reader:
    def read(folder: Path) -> None:
        for name in files:
            file = cut(folder / name, 2)
            numbers = [row.number for part in file.parts for row in rows(part)]
            assert numbers == sorted(set(numbers))
            assert set(numbers) <= set(range(1, file.lines + 1))
            assert len(numbers) == file.lines or cut is lines.cut  # of which blank ones are no rows
        assert file.lines == sum(part.lines for part in file.parts)

    return Reader(files, read)


def _table(name: str, content: bytes) -> Reader:
    """As the processes do in which preprocessing reads it."""

    def read(folder: Path) -> None:
        work_apart()
        table._open.cache_clear()
        file = table._cut(folder / name, 2)
        assert _rows_and_cells(file) == file.lines == sum(part.lines for part in file.parts)

    return Reader({name: content}, read, may_end=True)


def _rows_and_cells(file: InputFile) -> int:
    rows = [row for part in file.parts for row in table.rows(part)]
    for row in rows:
        for place in row.images.values():
            open_place(file.path, place).read()
    return len(rows)


def _tar(kind: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as made:
        for number, line in enumerate(LINES):
            name = f"{'long' * 40 * (number == 2)}{number}"
            for ending, content in (("json", line), ("png", b"x" * 700)):
                member = tarfile.TarInfo(f"{name}.{ending}")
                member.size = len(content)
                if (number, ending) == (3, "png"):
                    member.type, member.linkname, member.size = tarfile.LNKTYPE, "0.png", 0
                made.addfile(member, io.BytesIO(content[: member.size]))
    return out.getvalue()


def _columns() -> Any:
    images = [{"bytes": b"\x89PNG" * 300 * number, "path": f"{number}.png"} for number in range(1, 6)]
    return pyarrow.table({"conversations": [one["conversations"] for one in LONG], "image": images})


def _parquet() -> bytes:
    out = io.BytesIO()
    compression = {"image.bytes": "none", "image.path": "zstd", "conversations.list.element.from": "snappy"}
    pyarrow.parquet.write_table(_columns(), out, row_group_size=3, compression=compression)
    return out.getvalue()


def _arrow(layout: Callable[..., Any]) -> bytes:
    out, columns = io.BytesIO(), _columns()
    with layout(out, columns.schema) as writer:
        writer.write_table(columns, max_chunksize=2)
    return out.getvalue()


def _meta() -> Reader:
    sets = {
        "a": {"root": "", "annotation": "chat.jsonl", "repeat_time": 2, "max_dynamic_patch": 6, "length": 5},
        "b": {"root": ".", "annotation": "chat.json", "repeat_time": 0.5, "data_augment": False},
    }

    def read(folder: Path) -> None:
        (folder / "chat.jsonl").write_bytes(b"\n".join(LINES))
        (folder / "chat.json").write_bytes(b"[" + b",".join(LINES) + b"]")
        read_inputs([folder / "meta.json"], image_root=folder)

    return Reader({"meta.json": json.dumps(sets).encode()}, read)


def _dataset_dict() -> Reader:
    return Reader({"dataset_dict.json": b'{"splits": ["train", "test"]}'}, lambda folder: read_inputs([folder]))


def _note(folder: Path) -> Reader:
    """Whatever is in a note, what is read is what the file says."""
    folder.mkdir()
    (folder / "chat.jsonl").write_bytes(b"\n".join(LINES))
    whole = read_inputs([folder / "chat.jsonl"], 2, folder / "inputs")
    [note] = (folder / "inputs").glob("*.json")

    def read(given: Path) -> None:
        shutil.copyfile(given / "note.json", note)
        assert read_inputs([folder / "chat.jsonl"], 2, folder / "inputs") == whole

    return Reader({"note.json": note.read_bytes()}, read)


def _part(folder: Path) -> Reader:
    folder.mkdir()
    from examples.demo.data import make_demo_data

    make_demo_data(folder, samples=4, heldout_samples=1, seed=0)
    [file] = read_inputs([folder / "train.jsonl"])
    (folder / "job").mkdir()
    prepare_part(demo_recipe(folder), file.parts[0]).save(folder / "job/0000000.npz")

    def read(given: Path) -> None:
        (given / "job").mkdir(exist_ok=True)
        (given / "0000000.npz").replace(given / "job/0000000.npz")
        PreparedPart.load(given / "job/0000000.npz").rejections()

    return Reader({"0000000.npz": (folder / "job/0000000.npz").read_bytes()}, read)
