"""Nothing but the reading room decodes a file of anyone: what bypasses it bypasses its limits."""

import ast
from collections.abc import Iterator

from tests.programs import ROOT

FILES = [path for room in ("omnibal_ext", "megatron/vlm", "tools") for path in sorted((ROOT / room).rglob("*.py"))
         if "omnibal_ext/reading" not in path.as_posix()]  # fmt: skip
DECODERS = {"json.load", "np.load", "np.fromfile", "np.memmap", "pickle.load", "pickle.loads", "torch.load"}
OWN_TEXT = {
    "json.loads(done.stdout.splitlines()[-1])",  # a child's answer
    "json.loads(sys.argv.pop(1))",  # of the launcher
    "json.loads(line.decode('utf-8-sig'))",  # chat lines: every fault is a reject there, not an error
    "torch.load(value, weights_only=True)",  # builds tensors and plain values alone
    *(f"json.loads({text})" for text in (
        "text", "json.dumps(run)", "json.dumps(record)", "json.dumps(asked)", "json.dumps(self.identity)",
    )),
    "np.memmap(file, dtype, 'r+', shape=shape)",  # a file of ours without a name
    "json.loads(content, object_pairs_hook=_each_once)",  # of a meta file, which was decoded with all limits before
    "[json.loads(line) for line in self.rejected.tobytes().splitlines()]",
}  # fmt: skip


OPENERS = {
    ".open", ".fdopen", ".read_text", ".read_bytes", ".open_memmap", ".memory_map", ".ParquetFile", ".ZipFile",
    ".TarFile", ".SentencePieceProcessor", "open", "safe_open",
}  # fmt: skip
"""What opens a file by its name; with a dot: as an attribute."""
NO_FILES = (
    *("PackedIndex.open", "self.teams.open", "Image.open", "av.open", "os.open(os.devnull"),
    "sentencepiece.SentencePieceProcessor(model_proto=read_bytes(",
)
"""Calls of these names that open no file by its name: indexes check their own, decoders are given what was opened."""
WRITERS = ROOT / "omnibal_ext/files"
"""What is written, and locked (tests/unit/files/test_writing.py)."""
REVIEWED = {
    "omnibal_ext/__init__.py: path.read_bytes()": "sources of ours",
    "megatron/vlm/data/media/tile_cache.py: path.read_bytes()": "sources of ours",
    "omnibal_ext/__init__.py: stamp.read_text()": "our own note beside them",
    "megatron/vlm/platform.py: cpu.read_text()": "/proc/cpuinfo",
    "megatron/vlm/data/templates.py: TEMPLATES[name].read_text(encoding='utf-8')": "templates of ours",
    "megatron/vlm/data/formats/table.py: pyarrow.memory_map(str(path))": "opened by open_plain before",
    "megatron/vlm/data/formats/table.py: pyarrow.parquet.ParquetFile(open_plain(path, REMEDY))": "the same",
    "omnibal_ext/launch/scratch.py: os.open(folder, os.O_RDONLY)": "a folder of ours, to lock it",
    "omnibal_ext/launch/scratch.py: os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)": "the same",
    "megatron/vlm/hf/folder.py: "
    "safe_open(self.folder / self.stored[name].file, framework='pt')": "its header was checked",
}  # fmt: skip
"""Openings that need not go through the reading room, and why."""


def openings() -> Iterator[str]:
    """Files that are opened to be read outside of the reading room: "MODULE: CALL"."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or path.is_relative_to(ROOT / "tools") or path.parent == WRITERS:
                continue
            name = f".{node.func.attr}" if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            modes = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            text = ast.unparse(node)
            if name in OPENERS and not text.startswith(NO_FILES) and not any(set("wax+") & set(mode) for mode in modes):
                yield f"{path.relative_to(ROOT)}: {text}"


def test_files_are_opened_by_the_one_reader() -> None:
    """A named pipe would wait for ever, a device has no end: `open_plain` opens regular files alone."""
    found = set(openings())
    assert found - REVIEWED.keys() == set()
    assert REVIEWED.keys() - found == set()  # of those that are gone, so are the reasons


def test_files_are_decoded_by_the_one_reader() -> None:
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {*DECODERS, "json.loads"}:
                text = ast.unparse(node)
                if not any(text in allowed for allowed in OWN_TEXT):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}")
    assert not found
