"""What others wrote is bounded and checked before it is believed; everything else is one line with the file's name."""

import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnibal_ext.architectures.folder import read_config, weight_files
from omnibal_ext.architectures.presets import PRESETS
from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan
from omnibal_ext.reading import checks
from omnibal_ext.reading.arrays import UNPACKED, array_names, map_array, read_arrays
from omnibal_ext.reading.document import MOST_DEPTH, check_seal, decode, read_json, read_lines, sealed
from omnibal_ext.reading.tensors import read_tensor_entries
from omnibal_ext.sizes import Sizes
from tests.chains import layer_chain


def refused(read: Callable[[Path], Any], path: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        read(path)
    assert str(path) in str(refusal.value)
    assert str(refusal.value).isprintable()


def test_an_index_names_no_more_files_than_are_looked_for(tmp_path: Path) -> None:
    for count in (4096, 4097):
        names = {str(number): f"{number}.safetensors" for number in range(count)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        if count == 4096:
            assert weight_files(tmp_path) == names
        else:
            refused(weight_files, tmp_path, "names 4097 files, at most 4096")


LINES: Callable[[Path], Any] = lambda path: list(read_lines(path, lambda _, value: value, "mend it"))  # noqa: E731
READERS: list[Callable[[Path], Any]] = [Plan.load, Sizes.load, read_config, LINES]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b'"\xed\xa0\x80"', b"1" * 5000, b"\0", b"nul"]
)
def test_what_is_no_json_is_refused_by_every_reader(
    tmp_path: Path, read: Callable[[Path], Any], content: bytes
) -> None:
    (tmp_path / "file.json").write_bytes(content)
    refused(read, tmp_path / "file.json", "not JSON|must be|is a text")


@pytest.mark.parametrize("read", [*READERS, read_tensor_entries, lambda path: map_array(path, "mend it")])
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    refused(read, tmp_path / "pipe.json", "no regular file")
    refused(read, tmp_path, r"no regular file|Is a directory|tiles\.npy: cannot be read")


def test_a_document_is_as_deep_and_as_large_as_it_may_be(tmp_path: Path) -> None:
    """Strings do not count as depth."""
    decode(b"[" * MOST_DEPTH + b"]" * MOST_DEPTH)
    decode(json.dumps({"words": "[" * 1000}).encode())
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}")):
        with pytest.raises(UserError, match="nested deeper"):
            decode(opening * (MOST_DEPTH + 1) + b"1" + closing * (MOST_DEPTH + 1))
    (tmp_path / "a.json").write_text("[1]")
    assert read_json(tmp_path / "a.json", lambda _, value: value, "", 3) == [1]
    refused(lambda path: read_json(path, lambda _, value: value, "", 2), tmp_path / "a.json", "3 bytes, at most 2")


HUGE = [0, -1, 1.5, True, None, "1", [], {}, 10**400, 1e308, float("inf")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({"num_microbatches": value}, "num_microbatches must be a whole number from 1 to 65536") for value in HUGE),
        *(({"num_microbatches": value}, "num_microbatches must be") for value in (10**9, 2**16 + 1)),
        *(({"llm_budget": value}, "llm_budget must be a whole number") for value in (-5, 0.5, "4")),
        *(({"stages": [{"layers": [0, value]}]}, r"stages\[0\]\.layers\[1\] must be") for value in (0.9, -1, "9")),
        ({"stages": [{"layers": [0, 9, 9]}]}, r"stages\[0\]\.layers must be a list of 2 items"),
        ({"predicted": {"stage_seconds": [1, 2]}}, r"predicted\.stage_seconds must have 1 numbers, has 2"),
        ({"predicted": {"stage_seconds": ["a"]}}, r"predicted\.stage_seconds\[0\] must be a finite number"),
        ({"predicted": {"stage_peak_bytes": 7}}, r"predicted\.stage_peak_bytes must be a list"),
        ({"predicted": {"step_seconds": float("nan")}}, r"predicted\.step_seconds must be a finite number"),
        ({"alternatives": [{"stages": 1}]}, r"alternatives\[0\]\.stages must be a list"),
        ({"frozen": "vit"}, "frozen must be a list"),
        ({"model": "a\ud800"}, "model must be a text"),
        ({"memory_gib": -1}, "memory_gib must be a finite number of at least 0"),
    ],
)
def test_odd_fields_of_a_plan_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    record = Plan.from_cuts(layer_chain(3, 2), ()).to_record()
    (tmp_path / "plan.json").write_text(json.dumps({**record, **change}))
    refused(Plan.load, tmp_path / "plan.json", message)


def test_a_plan_that_lost_a_layer_is_not_the_models_though_its_hash_says_so() -> None:
    tiny = PRESETS["tiny"]
    chain, count = tiny.chain, len(tiny.chain)
    plan = Plan.from_cuts(chain[:2] + chain[3:], (), model="tiny", model_hash=tiny.hash)
    with pytest.raises(UserError, match="chain is not that of model 'tiny': it differs at layer 4"):
        plan.check_model(tiny)
    with pytest.raises(UserError, match=f"has {count + 1} layers, not {count}"):
        Plan.from_cuts((*chain, "head"), (), model_hash=tiny.hash).check_model(tiny)


def header(dtype: str = "'<i8'", shape: str = "(3,)", order: str = "False") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': {order}, 'shape': {shape}, }}".encode()
    text += b" " * (-len(text) - 11 % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x93NUMPY", header() + bytes(23), header(shape="(10**9,)") + bytes(24),
        header(shape="(1000000000000000,)"), header("'|O'") + bytes(24), header("[('a', '<i8')]") + bytes(24),
        header("'<i7'") + bytes(21), b"\x93NUMPY\x01\x00\xff\xff" + b" " * 100,
        header(shape="(3, )").replace(b"'shape'", b"'s'") + bytes(24),
    ],
)  # fmt: skip
def test_an_array_that_is_not_what_its_header_says_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    refused(lambda path: map_array(path, "make it again"), tmp_path / "a.npy", "make it again")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", content)
    refused(lambda path: read_arrays(path, ["a"], "make it again"), tmp_path / "a.npz", "make it again")


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.float32, np.bool_, "<U7"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (0, 3)])
def test_what_numpy_writes_is_read_as_numpy_reads_it(tmp_path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    np.save(tmp_path / "a.npy", array)
    np.savez_compressed(tmp_path / "a.npz", a=array, b=array)
    for found in (map_array(tmp_path / "a.npy", ""), *read_arrays(tmp_path / "a.npz", ["a", "b"], "")):
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)
    assert array_names(tmp_path / "a.npz", "") == ("a", "b")


def test_an_archive_that_unpacks_to_far_more_is_a_bomb(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as archive, archive.open("a.npy", "w") as file:
        file.write(header(shape=f"({UNPACKED // 8},)"))
        for _ in range(UNPACKED // 2**20):
            file.write(bytes(2**20))
    refused(lambda path: read_arrays(path, ["a"], "x"), tmp_path / "a.npz", "array 'a' would be")


def test_a_flipped_bit_of_an_archive_is_found(tmp_path: Path) -> None:
    Sizes.from_arrays([1, 2, 3], [10, 20, 30]).save(tmp_path / "a.npz")
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[content.index(b"tokens.npy") + 150] ^= 4
    (tmp_path / "a.npz").write_bytes(content)
    refused(Sizes.load, tmp_path / "a.npz", "damaged")


def tensors(entries: Any, size: int, names: int = 0) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", names or len(text)) + text + bytes(size)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "content",
    [
        b"1234", tensors({"a": F32}, 7), tensors({"a": F32}, 9), tensors({"a": F32}, 8, 2**63), tensors([], 0),
        tensors({"a": {**F32, "dtype": "I3"}}, 8), tensors({"a": {**F32, "shape": [3]}}, 8),
        tensors({"a": {**F32, "shape": [-2]}}, 8), tensors({"a": {**F32, "shape": [2**62, 4]}}, 8),
        tensors({"a": F32, "b": F32}, 8), tensors({"a": F32, "b": {**F32, "data_offsets": [12, 20]}}, 20),
        tensors({"a": {**F32, "data_offsets": [0.0, 8]}}, 8), tensors({"a": 1}, 8), tensors({"a": {"dtype": "F32"}}, 8),
        tensors({"a": F32, "__metadata__": {"x": 1}}, 8), tensors({"a": {**F32, "data_offsets": [8, 0]}}, 8),
    ],
)  # fmt: skip
def test_tensors_must_fill_their_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(read_tensor_entries, tmp_path / "model.safetensors", "download it again")


@pytest.mark.parametrize(
    "name", ["../../x.safetensors", "/x.safetensors", "x.bin", "a/b.safetensors", ".safetensors", 1]
)
def test_an_index_names_files_of_its_own_folder(tmp_path: Path, name: Any) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": name}}))
    refused(lambda path: weight_files(path.parent), path, r"weight_map\.a must be")


def test_a_changed_manifest_is_not_believed() -> None:
    manifest = sealed({"samples": 3, "sizes": (1, 2), "by_number": {10: "a", 9: "b"}})
    check_seal(json.loads(json.dumps(manifest)))
    for change in ({"samples": 4}, {"more": 1}, {"manifest_hash": "0"}):
        with pytest.raises(UserError, match="manifest_hash"):
            check_seal({**manifest, **change})


def test_texts_among_sizes_do_not_widen_an_array(tmp_path: Path) -> None:
    """NumPy would make every row as wide as the longest text."""
    rows = [{"vit_num": 1, "token_num": 2}] * 50_000 + [{"vit_num": "x" * 1_000_000, "token_num": 1}]
    (tmp_path / "sizes.json").write_text(json.dumps(rows))
    refused(Sizes.load, tmp_path / "sizes.json", "row 50000: vit_num must be whole numbers")


def test_lines_are_read_one_at_a_time_and_named(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_bytes(b'{"a": 1}\n{"a": 2}\n{"a":\n')
    lines = iter(read_lines(tmp_path / "lines.jsonl", lambda _, value: value, "mend it"))
    assert [next(lines), next(lines)] == [{"a": 1}, {"a": 2}]
    with pytest.raises(UserError, match="line 3: not JSON"):
        next(lines)


@pytest.mark.parametrize("value", ["a\0b", "\0", "a\ud800", 7, None, ["a"], "a" * (2**16 + 1)])
def test_a_text_can_be_written_and_be_a_file_s_name(value: object) -> None:
    assert checks.text("name", "a" * 2**16) == "a" * 2**16
    assert checks.text("name", "ä/日本\n") == "ä/日本\n"
    with pytest.raises(UserError, match="name must be a text, got"):
        checks.text("name", value)
