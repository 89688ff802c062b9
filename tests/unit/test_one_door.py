"""Files of others are unpickled behind one door: no other module of ours can have a pickle run, or text evaluated."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("megatron/vlm", "omnibal_ext", "tools", "scripts", "examples", "benchmarks")
GUARD, SAFE = "megatron/vlm/checkpoint/guard.py", "megatron/vlm/checkpoint/safe.py"
DOORS = {
    "megatron.training.checkpointing.load_checkpoint": {GUARD},
    "megatron.training.training.load_checkpoint": {GUARD},
    "torch.distributed.checkpoint.load": {SAFE},
    "torch.distributed.checkpoint.FileSystemReader": {SAFE},
    "torch.distributed.checkpoint.DefaultLoadPlanner": {SAFE},
    "torch.load": {SAFE},
}
"""Who alone may use what; of `torch.load`, without weights_only=True."""
CLOSED = (
    "megatron.training.checkpointing.load", "megatron.training.checkpointing._load", "torch.hub.", "torch.jit.load",
    "megatron.core.dist_checkpointing.load", "megatron.core.dist_checkpointing.serialization.load",
    "megatron.core.dist_checkpointing.strategies.common.load", "torch.distributed.checkpoint.load",
    "torch.distributed.checkpoint.state_dict_loader", "torch.distributed.checkpoint.FileSystemReader",
    "torch.distributed.checkpoint.filesystem.FileSystemReader", "torch.serialization.load", "torch.package",
    "pickle.load", "pickle.Unpickler", "pickle._load", "pickle._Unpickler", "builtins.eval", "builtins.exec",
    "joblib", "shelve", "marshal", "dill", "cloudpickle", "yaml.load", "yaml.unsafe", "yaml.full", "yaml.Loader",
    "yaml.UnsafeLoader", "yaml.FullLoader",
)  # fmt: skip
"""How names begin that nobody may use."""
WORDS = re.compile(
    r"load|[Uu]npickl|\b(eval|exec|joblib|shelve|marshal|dill|yaml|allow_pickle|trust_remote_code)\b|FileSystemReader"
    r"|torch\.(hub|package)"
)
"""Some of these are in every file that has a fault."""
NEVER_TRUE = ("allow_pickle", "trust_remote_code")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def uses(tree: ast.Module) -> Iterator[tuple[str, ast.AST, ast.AST | None]]:
    """Full names of all that a module uses, with the call of which each is the function, if any."""
    known, calls, names = {"eval": "builtins.eval", "exec": "builtins.exec"}, {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                first = one.name.partition(".")[0]
                known[one.asname or first] = one.name if one.asname else first
                yield one.name, node, None
        elif isinstance(node, ast.ImportFrom) and node.module:
            for one in node.names:
                known[one.asname or one.name] = f"{node.module}.{one.name}"
                yield f"{node.module}.{one.name}", node, None
        elif isinstance(node, ast.Call):
            calls[id(node.func)] = node
        elif isinstance(node, ast.Name | ast.Attribute):
            names.append(node)
    for node in names:
        inner, at = [], node
        while isinstance(at, ast.Attribute):
            inner.append(at.attr)
            at = at.value
        if isinstance(at, ast.Name) and at.id in known:
            yield ".".join([known[at.id], *reversed(inner)]), node, calls.get(id(node))


def takes_weights_only(call: ast.AST | None) -> bool:
    return isinstance(call, ast.Call) and any(
        word.arg == "weights_only" and isinstance(word.value, ast.Constant) and word.value.value is True
        for word in call.keywords
    )


def faults(name: str, text: str) -> Iterator[str]:
    """What a module does that is done behind the door alone."""
    tree = ast.parse(text)
    for used, node, call in uses(tree):
        if used == "torch.load":
            is_fault = name != SAFE and not takes_weights_only(call)
        elif used in DOORS:
            is_fault = name not in DOORS[used]
        else:
            is_fault = used.startswith(CLOSED) and not any(
                used.startswith(f"{door}.") and name in who for door, who in DOORS.items()
            )
        if is_fault:
            yield f"{name}:{getattr(node, 'lineno', 0)}: {used}"
    for node in ast.walk(tree):
        for word in node.keywords if isinstance(node, ast.Call) else ():
            if word.arg in NEVER_TRUE and not (isinstance(word.value, ast.Constant) and word.value.value is False):
                yield f"{name}:{node.lineno}: {word.arg}"


def test_nobody_loads_beside_the_door() -> None:
    assert len(FILES) > 300
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
    assert not [fault for name, text in texts.items() if WORDS.search(text) for fault in faults(name, text)]


@pytest.mark.parametrize("line", [
    "from megatron.training.checkpointing import load_checkpoint", "import pickle\npickle.loads(b'')",
    "from megatron.training import checkpointing\ncheckpointing.load_checkpoint([], None, None)",
    "from megatron.training import training as t\nt.load_checkpoint([], None, None)",
    "from megatron.core import dist_checkpointing\ndist_checkpointing.load({}, 'a')",
    "from megatron.core.dist_checkpointing import load_common_state_dict", "import torch\ntorch.load('a')",
    "import torch\ntorch.load('a', weights_only=False)", "import torch\nread = torch.load", "from torch import load",
    "from torch.distributed import checkpoint as dcp\ndcp.load({}, checkpoint_id='a')", "import joblib",
    "import torch\ntorch.distributed.checkpoint.load({})", "from pickle import Unpickler",
    "import yaml\nyaml.load('a')",
    "import numpy as np\nnp.load('a', allow_pickle=True)", "import numpy as np\nnp.load('a', allow_pickle=sure)",
    "eval('1')", "run = exec", "import shelve as s", "from marshal import loads",
    "from torch.distributed.checkpoint import FileSystemReader", "f(trust_remote_code=True)",
])  # fmt: skip
def test_another_door_is_seen(line: str) -> None:
    assert list(faults("tools/new.py", line))


@pytest.mark.parametrize("line", [
    "import torch\ntorch.load('a', weights_only=True)", "import pickle\npickle.dumps(1)", "stage.eval()",
    "import numpy as np\nnp.load('a', allow_pickle=False)",
    "from torch.distributed import checkpoint as dcp\ndcp.save({})",
])  # fmt: skip
def test_what_runs_nothing_is_nobodys_fault(line: str) -> None:
    assert not list(faults("tools/new.py", line))
