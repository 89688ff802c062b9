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


def test_files_are_decoded_by_the_one_reader() -> None:
    found = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {*DECODERS, "json.loads"}:
                text = ast.unparse(node)
                if not any(text in allowed for allowed in OWN_TEXT):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}")
    assert not found
