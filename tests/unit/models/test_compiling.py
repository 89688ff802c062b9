"""Small functions are compiled once for packs of all sizes."""

import json
import subprocess
import sys

import pytest
import torch

from megatron.vlm.compiling import for_any_rows
from tests.programs import ROOT, environment


def graphs(*words: str) -> list[int]:
    command = [sys.executable, "-P", "-W", "ignore", str(ROOT / "tests/unit/models/compiling.py"), *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-3000:]
    found: list[int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.starts
@pytest.mark.parametrize(
    ("model", "most", "of_one_tile"), [("small", 16, 0), pytest.param("gemma", 22, 4, marks=pytest.mark.long)]
)
def test_the_first_pack_compiles_for_all(model: str, most: int, of_one_tile: int) -> None:
    """Seven functions of the first model, with gradients and, where layers are computed again, without; torch by itself
    compiles 33. The other has norms of many forms: of one function more than torch by itself would compile."""
    first, *others, last = graphs(model)
    assert others == [first] * 6
    assert first <= most
    assert last <= first + of_one_tile


def test_what_is_not_compiled_stays_as_it_is() -> None:
    """Where the compiler is off, and modules; options and calls are handed on."""

    def double(x: torch.Tensor, *, by: float = 2.0) -> torch.Tensor:
        return x * by

    asked: list[dict[str, object]] = []

    def compiler(function: object, **options: object) -> object:
        asked.append(options)
        return function if isinstance(function, torch.nn.Module) or options else lambda *a, **k: double(*a, **k) + 1

    compiled, module = for_any_rows(compiler), torch.nn.Identity()
    assert compiled(module) is module
    assert compiled(mode="default")(double) is double
    launched = compiled(double)
    assert launched.__name__ == "double"
    assert launched(torch.ones(2), by=3.0).tolist() == [4.0, 4.0]
    assert asked == [{}, {"mode": "default"}, {}]
