"""An input file is read whole or refused in a line: nothing behind an end is dropped, no damage ends the program."""

import io
import json
import os
import random
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.vlm.data.formats import json_list, lines, table, tar
from megatron.vlm.data.formats.places import open_place
from megatron.vlm.data.formats.rows import InputFile, Row
from megatron.vlm.preprocessing.inputs import FORMATS, read_inputs
from omnibal_ext.errors import UserError
from omnibal_ext.launch.apart import apart
from omnibal_ext.reading import memory
from tests.demo import turns

pyarrow, ipc, pq = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.ipc", "pyarrow.parquet"))

ELEMENTS = (1, "x" * 30 + '"]\\', {"a": [1, "é]", {}]}, [], None, {"b": "\\\\"}, -1.5e3, [[[[[["deep"]]]]]], {"c": {}})


def rows_of(file: InputFile) -> list[Row]:
    return [row for part in file.parts for row in FORMATS[part.format].rows(part)]


def written(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


@pytest.mark.parametrize("indent", [None, 1])
def test_elements_of_a_list_are_those_of_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None
) -> None:
    """Wherever blocks of the file end, and of whatever size the parts are."""
    generator = random.Random(0)
    for size in range(1, 40):
        monkeypatch.setattr(json_list, "_BLOCK", size)
        wanted = generator.choices(ELEMENTS, k=generator.randrange(12))
        file = json_list.cut(written(tmp_path, "a.json", json.dumps(wanted, indent=indent).encode()), 3)
        found = rows_of(file)
        assert [json.loads(row.record) for row in found] == wanted  # type: ignore[arg-type]
        assert [row.number for row in found] == list(range(1, len(wanted) + 1))
        assert file.lines == len(wanted)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2][3]", r"line 1, behind '\[1, 2\]': the list has ended, and more follows"),
        ("[1] and more", r"behind '\[1\] ': the list has ended"),
        ("[1]" + "\n" * 5000 + "{", "line 5001, .*: the list has ended"),
        ("[1]\0", r"behind '\[1\]': the list has ended"),
        *((text, "line 1, .*: a comma or the end of the list is due") for text in ("[1 2]", "[{}{}]", "[1 }]")),
        *((f"[{text}", "(no element|Expecting value)") for text in ("1,,2]", "1, ]", ",1]", "}")),
        *((text, "the file ends before what begins here") for text in ("[", "[1", '["a', '[{"a": 1}', '["a\\"]')),
        ('[\n{"a":\n[}]', r"line 3, behind .*: Expecting value"),
        ('[\n{"a": 1},\n{"b": "c",\n"d: "e"}]', "line 4, behind .*: Expecting ':' delimiter"),
        ("[" * 5000, "nested deeper than 1000"),
    ],
)
def test_a_list_of_another_form_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_inputs([written(tmp_path, "a.json", text.encode())])


def test_an_element_that_is_no_json_is_a_row(tmp_path: Path) -> None:
    """It is rejected by itself, as a line would be."""
    file = json_list.cut(written(tmp_path, "a.json", b'[{"a": 1 1}, nul, {"b": 2}]'), 5)
    assert [row.record for row in rows_of(file)] == [b'{"a": 1 1}', b"nul", b'{"b": 2}']


def test_lines_are_those_between_line_feeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = random.Random(0)
    for size in range(1, 60):
        monkeypatch.setattr(lines, "_BLOCK", size % 9 + 1)
        content = b"".join(generator.choices([b"\n", b"a", b"\r\n", b"bcd", b"\xef\xbb\xbf"], k=size))
        file = lines.cut(written(tmp_path, "a.jsonl", content), generator.randrange(1, 6))
        every = content.split(b"\n")
        assert file.lines == len(every) - (every[-1] == b"") == sum(part.lines for part in file.parts)
        wanted = [(n, line) for n, line in enumerate(every, 1) if line.replace(b"\xef\xbb\xbf", b"", 1).strip()]
        assert [(row.number, row.record) for row in rows_of(file)] == wanted
        assert all(content[row.offset :].startswith(line) for row, (_, line) in zip(rows_of(file), wanted, strict=True))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_record_too_large_to_decode_is_one_reject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for room in (lines, json_list):
        monkeypatch.setattr(room, "MOST_BYTES", 100)
    monkeypatch.setattr("megatron.vlm.data.formats.rows.MOST_BYTES", 100)
    monkeypatch.setattr("megatron.vlm.data.formats.rows._SMALL", 30)
    monkeypatch.setattr("megatron.vlm.data.formats.rows.MOST_VALUES", 20)
    records = [b'{"a": 1}', b'{"a": "%s"}' % (b"b " * 45), b'{"a": [%s2]}' % (b"1," * 25), b'["%s"]' % (b"c" * 95)]
    records += [b'{"a": ["%s", "%s"]}' % (b"d" * 80, b"d" * 80), b'{"b": 2}']
    text = b"[" + b",\n".join(records) + b"]" if name == "a.json" else b"\n".join(records)
    [file] = read_inputs([written(tmp_path, name, text)], 4)
    assert [bool(row.fault) for row in rows_of(file)] == [False, False, True, False, True, False]


# --- tars


def tar_bytes(*members: tuple[str, bytes, dict[str, Any]], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as made:
        for name, content, fields in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            for field, value in fields.items():
                setattr(member, field, value)
            made.addfile(member, io.BytesIO(content))
    return out.getvalue()


SAID = json.dumps({"conversations": turns("What?", "A cat.")}).encode()
PAIR = (("a.json", SAID, {}), ("a.png", b"pixels", {}))
BODY = tar_bytes(*PAIR)[: 4 * 512]


def header(size: int, name: str = "b.json", kind: bytes = tarfile.REGTYPE) -> bytes:
    """A header whose size may be any number."""
    member = tarfile.TarInfo(name)
    member.type = kind
    block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = (b"\xff" if size < 0 else b"\x80") + (size % 2**88).to_bytes(11, "big")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(**records: str) -> bytes:
    return tar_bytes(
        *PAIR, ("b.json", b"", {"pax_headers": {key.replace("_", "."): one for key, one in records.items()}})
    )


LONG = header(5, "long", tarfile.GNUTYPE_LONGNAME) + b"abcd\0".ljust(512, b"\0")
TARS = {
    "a size below zero": (BODY + header(-512) + bytes(1024), "member 'b.json' says -512 bytes"),
    "a size far below": (BODY + header(-(2**60)) + bytes(1024), "member 'b.json' says -1152921504606846976 bytes"),
    "a huge size": (BODY + header(2**60) + bytes(1024), "ends inside 'b.json', which says 1152921504606846976 bytes"),
    "a size below zero in words": (pax(size="-512"), "member 'b.json' says '-512' bytes"),
    "a huge size in words": (pax(size="1" + "0" * 30), "member 'b.json' says '1000000000000000000000000000000' bytes"),
    "a sparse member": (pax(GNU_sparse_map="a,b"), "member 'b.json' is stored as sparse"),
    "an old sparse member": (
        BODY + header(0, kind=tarfile.GNUTYPE_SPARSE) + bytes(1024),
        "'b.json' is stored as sparse",
    ),
    "long names without a member": (
        BODY + LONG * 3000 + bytes(1024),
        "at byte 2048 has no header of its own",
    ),
    "a long name of many bytes": (BODY + header(10**8, "n", tarfile.GNUTYPE_LONGNAME), "says 100000000 bytes"),
    "a damaged extended header": (BODY + header(20, "x", tarfile.XHDTYPE) + b"7" * 512 + bytes(1024), "is damaged"),
    "a size for all": (BODY + header(12, "g", tarfile.XGLTYPE) + b"12 size=512\n".ljust(512, b"\0"), "sets 'size'"),
    "two that were joined": (tar_bytes(*PAIR) * 2, "goes on behind its end at byte 2048"),
    "words behind its end": (tar_bytes(*PAIR) + b"words", "goes on behind its end"),
    "no end": (BODY, "has no end"),
    "a damaged header": (BODY + b"\1" * 512 + bytes(1024), "no header at byte 2048"),
}


@pytest.mark.parametrize("name", TARS)
def test_a_damaged_tar_is_refused_naming_the_member(tmp_path: Path, name: str) -> None:
    content, message = TARS[name]
    with pytest.raises(UserError, match=rf"a\.tar: is no whole tar \(.*{message}"):
        read_inputs([written(tmp_path, "a.tar", content)])


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_members_are_where_tarfile_finds_them(tmp_path: Path, form: int) -> None:
    names = ["a.json", "a.png", "long" * 22 + ".json", "folder/é.json", "folder/é.jpg"]
    names += ["n/" * 60 + "b.json"] if form != tarfile.USTAR_FORMAT else []
    path = written(tmp_path, "a.tar", tar_bytes(*((name, SAID + name.encode(), {}) for name in names), form=form))
    with tarfile.open(path) as whole:
        wanted = [(member.name, member.offset_data, member.size) for member in whole.getmembers()]
    from omnibal_ext.reading.tars import members

    with path.open("rb") as file:
        assert [(one.name, one.start, one.size) for one in members(file, path.stat().st_size)] == wanted
    assert [row.offset for row in rows_of(tar.cut(path, 1))] == [at for name, at, _ in wanted if name.endswith("json")]


def link(name: str, target: str, kind: bytes = tarfile.LNKTYPE) -> tuple[str, bytes, dict[str, Any]]:
    return name, b"", {"type": kind, "linkname": target}


def test_a_hard_link_is_the_file_to_which_it_leads(tmp_path: Path) -> None:
    """As GNU tar stores a file that has several names; also in another part, and through another link."""
    more = [
        ("b.json", SAID, {}), link("b.png", "./a.png"),
        ("c.json", SAID, {}), link("c.png", "b.png"),
        ("d.json", SAID, {}), link("d.png", "later.png"),
        ("e.json", SAID, {}), link("e.png", "a.png", tarfile.SYMTYPE),
        ("later.png", b"other", {}),
    ]  # fmt: skip
    path = written(tmp_path, "a.tar", tar_bytes(*PAIR, *more))
    found = rows_of(tar.cut(path, 1))
    pictures = [open_place(path, row.images["png"]).read() for row in found if not row.fault]
    assert pictures == [b"pixels"] * 3
    faults = [row.fault for row in found if row.fault]
    assert [reason for reason, _ in faults] == ["missing_image", "missing_image", "malformed_line"]
    assert "'d.png' is a link to 'later.png', no file before it" in faults[0][1]


def test_a_record_nested_without_end_is_a_row(tmp_path: Path) -> None:
    path = written(tmp_path, "a.tar", tar_bytes(*PAIR, ("b.json", b"[" * 10**5, {})))
    assert [row.record for row in rows_of(tar.cut(path, 9))][1] == b"[" * 10**5


# --- tables


def columns(count: int = 12) -> Any:
    said = [turns("What?", "A cat. " * number) for number in range(1, count + 1)]
    return pyarrow.table({"conversations": said, "image": [f"{number:04d}.png" for number in range(count)]})


def arrow(layout: Callable[..., Any], count: int = 12) -> bytes:
    out = io.BytesIO()
    with layout(out, columns().schema) as writer:
        writer.write_table(columns(count), max_chunksize=5)
    return out.getvalue()


def parquet(count: int = 12, **options: Any) -> bytes:
    out = io.BytesIO()
    pq.write_table(columns(count), out, row_group_size=5, **options)
    return out.getvalue()


STREAM, FILE, PARQUET = arrow(ipc.new_stream), arrow(ipc.new_file), parquet()
LAST = STREAM.rindex(b"\xff\xff\xff\xff")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.arrow", STREAM * 2, "goes on behind its end"),
        ("a.arrow", FILE * 2, "goes on behind its end"),
        ("a.arrow", FILE[:-1], "goes on behind its end"),
        ("a.arrow", STREAM[:LAST], "has no end: it is cut off"),
        ("a.parquet", PARQUET * 2, "several files that were joined"),
        ("a.parquet", parquet(40) + PARQUET, "several files that were joined"),
        ("a.parquet", PARQUET + b"\n", "is no whole parquet file"),
    ],
)
def test_tables_that_were_joined_or_cut_off_are_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    with pytest.raises(UserError, match=rf"{name}: .*{message}"):
        read_inputs([written(tmp_path, name, content)])


@pytest.mark.parametrize(("slot", "value"), [(11, 70_000), (12, 2**30), (1, -(2**20))])
@pytest.mark.parametrize("whole", [arrow(ipc.new_stream, 5), arrow(ipc.new_file, 5)])
def test_offsets_that_lead_out_of_a_table_are_refused(tmp_path: Path, whole: bytes, slot: int, value: int) -> None:
    """Read without a check they end the process, or put its memory into the data."""
    offsets = struct.pack("<6i", *range(0, 48, 8))
    at = whole.index(offsets) + 4 * min(slot, 5)
    path = written(tmp_path, "a.arrow", whole[:at] + struct.pack("<i", value) + whole[at + 4 :])
    file = table.cut(path, 9)
    with pytest.raises(UserError, match=r"a\.arrow: is no whole arrow file \(.*Offset invariant failure"):
        apart(rows_of, (file,), "rows")


def test_a_small_table_of_large_values_or_many_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in (memory, table):
        monkeypatch.setattr(room, "MOST_BEYOND", 2**26)
    many = pyarrow.nulls(70_000, columns().schema.field("conversations").type)
    pq.write_table(pyarrow.table({"conversations": many}), tmp_path / "many.parquet")
    with pytest.raises(UserError, match=r"many\.parquet: has 70000 rows in \d+ bytes"):
        table.cut(tmp_path / "many.parquet", 9)
    large = columns(1).append_column("id", pyarrow.array(["A" * 2**26], pyarrow.large_string()))
    pq.write_table(large, tmp_path / "large.parquet", compression="zstd", use_dictionary=False)
    assert (tmp_path / "large.parquet").stat().st_size < 10**5
    with pytest.raises(UserError, match=r"large\.parquet: reading it takes its size and 64 MiB of memory, and more"):
        apart(rows_of, (table.cut(tmp_path / "large.parquet", 9),), "rows")


# --- whatever stands where a file is due


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.tar", "a.parquet", "a.arrow", "in a meta file", "a folder's"])
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / (name if "." in name else "b.parquet"))
    path = tmp_path / name
    if name == "in a meta file":
        path = written(tmp_path, "meta.json", b'{"s": {"annotation": "b.parquet"}}')
    with pytest.raises(UserError, match="no regular file"):
        read_inputs([tmp_path if name == "a folder's" else path])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"s": {"annotation": "a.jsonl"}, "s": {"annotation": "b.jsonl"}}', "'s' is given twice"),
        (b'{"s": {"annotation": "a.jsonl", "root": ["x"]}}', "set 's': root must be a text"),
        (b'{"s": {"annotation": "%s"}}' % (b"x" * 300), "File name too long"),
        (b'{"s": {"annotation": "a\\u0000b"}}', "set 's': annotation must be a text"),
        (b'{"s": {"annotation": "a.jsonl", "max_dynamic_patch": true}}', "max_dynamic_patch is True"),
        (b'{"s": {"annotation": "a.jsonl", "%s": 1}}' % (b"x" * 70_000), "is not known"),
        (b'{"t": 5, "s": {"annotation": "a.jsonl"}}', "set 't': has no 'annotation'"),
    ],
)
def test_an_odd_meta_file_is_refused_in_a_line(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        read_inputs([written(tmp_path, "meta.json", content)])
    assert len(str(error.value)) < 2000


@pytest.mark.parametrize("content", [b"{nope", b'{"a": 1}', b'{"splits": [1]}', b"[" * 10**5, b'{"splits": []}', b"5"])
def test_an_odd_list_of_splits_is_refused_in_a_line(tmp_path: Path, content: bytes) -> None:
    written(tmp_path, "dataset_dict.json", content)
    with pytest.raises(UserError, match=r"dataset_dict\.json: "):
        read_inputs([tmp_path])
