"""Counts the readers of files from outside: functions of the product that open or decode what others wrote.

A reader is a function that calls one of `DOORS`. `readers_of_source` finds them in the source, `entered` says which of
them a program runs; so a reader that no damaged file reaches is seen.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
OURS = {
    ("omnibal_ext/__init__.py", "forget_stale"): "our own sources, to see which compiled functions are of older ones",
    ("megatron/vlm/data/media/tile_cache.py", "_code"): "our own sources, of which tiles are kept",
    ("omnibal_ext/launch/check.py", "check"): "what a process of ours prints",
    ("omnibal_ext/launch/conversations.py", "check_conversations"): "what a process of ours prints",
    ("omnibal_ext/launch/weights.py", "convert"): "what a process of ours prints",
    ("megatron/vlm/preflight/__main__.py", "main"): "an argument that our launcher gives",
    ("omnibal_ext/files/records.py", "sha256_of"): "any bytes",
    ("omnibal_ext/launch/weights.py", "converted_folder"): "any bytes",
    ("tools/look.py", "is_sizes"): "any bytes: whether a word is among the first",
    ("megatron/vlm/checkpoint/safe.py", "_read_once"): "hands a path to `read_contents`",
    ("megatron/vlm/preprocessing/job.py", "PreprocessJob.finished"): "the manifest of a dataset, by its seal",
    ("megatron/vlm/checkpoint/run.py", "_content"): "manifests that a run has read before",
    **{
        ("megatron/vlm/data/formats/table.py", name): "in a process of its own, which the readers of tables start"
        for name in ("_Arrow.__init__", "_Arrow.check", "_Parquet.__init__", "_Parquet.check", "_cut", "_open")
    },
}
"""Functions that call a door and are not seen here, and why: what they read is ours, or is read elsewhere."""
ROOMS = ("omnibal_ext", "megatron/vlm", "tools")
DOORS = frozenset({
    "open_plain", "read_bytes", "read_json", "read_lines", "read_record", "decode",
    "read_tensor_entries", "read_arrays", "map_array", "array_names", "read_contents",
    "av.open", "Image.open", "SentencePieceProcessor", "Tokenizer.from_file", "Tokenizer.from_str", "from_string",
    "open_file", "ParquetFile", "open_stream", "read_csv", "json.loads", "json.load", "np.load", "IndexedDataset",
})  # fmt: skip
"""What opens or decodes a file: ours in `omnibal_ext.reading`, and those of libraries, as they are called."""
Function = tuple[str, str]
"""Path below the repository, and qualified name of the outermost function, as `Class.method`."""


def readers_of_source() -> set[Function]:
    """Every function of the product that calls a door, but for the doors themselves."""
    found = set()
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if not name.startswith("omnibal_ext/reading/"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {(name, function) for function, node in _functions(tree, "") if any(map(_is_door, ast.walk(node)))}
    return found


def _functions(tree: ast.AST, inside: str) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield f"{inside}{node.name}", node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{inside}{node.name}.")
        else:
            yield from _functions(node, inside)


def _is_door(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    if called in DOORS:
        return True
    owner, _, name = called.rpartition(".")
    return bool(owner) and (name in DOORS or f"{owner.rpartition('.')[2]}.{name}" in DOORS) and name != "decode"


def entered(program: Callable[[], Any]) -> set[Function]:
    """The functions of the product that run while the program does; what it raises is passed over."""
    codes = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    sys.setprofile(note)
    try:
        with suppress(Exception):
            program()
    finally:
        sys.setprofile(None)
    inside = f"{ROOT}/"
    return {
        (code.co_filename.removeprefix(inside), code.co_qualname.partition(".<locals>")[0])
        for code in codes
        if code.co_filename.startswith(inside)
    }
