"""Nothing but the reading room decodes a file of anyone: what bypasses it bypasses its limits."""

import ast

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
        "text", "json.dumps(run)", "json.dumps(record)", "note.read_text(encoding='utf-8')", "content",
        "(folder / 'dataset_dict.json').read_text()", "path.read_bytes()", "path.read_text()",
        "json.dumps(self._asked())", "json.dumps(self.identity)",
    )),
    "[json.loads(line) for line in self.rejected.tobytes().splitlines()]",
}  # fmt: skip


OF_FOLDERS = (
    "omnibal_ext/architectures", "omnibal_ext/families", "omnibal_ext/launch/weights", "megatron/vlm/families",
    "megatron/vlm/hf", "megatron/vlm/preflight/dataset", "megatron/vlm/preprocessing/folder_",
    "megatron/vlm/preprocessing/model_recipe", "megatron/vlm/preprocessing/tokenizer", "megatron/vlm/data/templates",
    "megatron/vlm/data/chat_program", "megatron/vlm/data/sandbox", "megatron/vlm/data/media/processor_fields",
)  # fmt: skip
"""Modules that read files of a model's folder."""
OPENERS = {
    "open", "read_text", "read_bytes", "from_file", "load_file", "from_buffer", "SentencePieceProcessor", "safe_open",
    "from_pretrained", "from_string",
}  # fmt: skip
KNOWN = {
    "SentencePieceProcessor(read_bytes(path, REMEDY, MOST_BYTES))", "from_buffer(read_bytes(path, REMEDY, MOST_BYTES))",
    "read_bytes(path, REMEDY, MOST_BYTES)", "read_bytes(file, REMEDY, MOST_BYTES)",
    "read_bytes(file, AGAIN, MOST_TEMPLATE)", "read_bytes(source / CONFIG, 'download it again', MOST_BYTES)",
    "read_text()",  # ours, in the package
    "open('wb')",  # written
    "safe_open(self.folder / self.stored[name].file)",  # whose header the reading room has checked
    "from_pretrained(theirs)", "from_pretrained(model, peft)",  # converted and compared: checked as above
}  # fmt: skip
"""Name and positional arguments of each call that opens a file, or has a library open one, with what limits it."""


def test_files_of_a_models_folder_are_opened_by_the_one_opener() -> None:
    found = {}
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())) if name.startswith(OF_FOLDERS) else ():
            if isinstance(node, ast.Call) and (call := ast.unparse(node.func).rpartition(".")[2]) in OPENERS:
                given = [*node.args, *(word.value for word in node.keywords if word.arg == "model_proto")]
                found[f"{call}({', '.join(map(ast.unparse, given))})"] = f"{name}:{node.lineno}"
    assert {call: place for call, place in found.items() if call not in KNOWN} == {}
    assert set(found) == KNOWN


def test_files_are_decoded_by_the_one_reader() -> None:
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {*DECODERS, "json.loads"}:
                text = ast.unparse(node)
                if not any(text in allowed for allowed in OWN_TEXT):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}")
    assert not found
