"""Kernels of other packages count where the function that is called is there and takes what it is given."""

import json
import sys
from pathlib import Path

import pytest

from megatron.vlm import optional
from tests.programs import behind_torch


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(optional, "UNUSABLE", {})
    for name in [name for name in sys.modules if name.startswith("kernels_of")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


@pytest.mark.parametrize(
    ("package", "lines", "why"),
    [
        ("kernels_of_others", "def another(): pass",
         "it has no attend: another package of this name, or a part of one"),
        ("kernels_of_old", "def attend(q, k): pass", "attend does not take lengths: another version is needed"),
        ("kernels_of_swallowers", "def attend(q, k, **_): pass",
         "attend does not take lengths: another version is needed"),
        ("kernels_of_nothing", "raise OSError('undefined\\n symbol')", "undefined symbol"),
        ("kernels_of_ours", "def attend(q, k, *, lengths=None): pass", None),
        ("kernels_of_classes", "class attend:\n    def __init__(self, k, lengths): pass", None),
        ("kernels_of_wrapped", "import functools\n"
         "def inner(q, lengths): pass\n"
         "@functools.wraps(inner)\n"
         "def attend(*a, **k): pass", None),
        ("kernels_of_c", "from math import hypot as attend", None),
    ],
)  # fmt: skip
def test_a_kernel_is_its_function(packages: Path, package: str, lines: str, why: str | None) -> None:
    (packages / f"{package}.py").write_text(lines + "\n")
    assert optional.usable(package, "attend", "lengths") == (why is None)
    wanted = {} if why is None else {package: why}
    assert wanted == optional.UNUSABLE
    assert (sys.modules.get(package, package) is None) == (package == "kernels_of_nothing"), "hidden from Megatron"


def test_what_is_not_installed_is_not_named(packages: Path) -> None:
    assert not optional.usable("kernels_of_nobody.inner", "attend")
    assert not optional.installed("kernels_of_nobody.inner")
    assert optional.UNUSABLE == {}


ASK = """
import json
import torch
torch.cuda.is_available, torch.cuda.get_device_capability = lambda: True, lambda: (9, 0)
from megatron.vlm import optional, platform
if platform.HAS_FLASH_ATTENTION:
    from flash_attn import flash_attn_varlen_func
if platform.HAS_FLASH_ATTENTION_4:
    from flash_attn.cute import flash_attn_varlen_func
print(json.dumps([platform.HAS_FLASH_ATTENTION, platform.HAS_FLASH_ATTENTION_4, optional.UNUSABLE]))
"""
LENGTHS = "cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None"
SECOND = f"def flash_attn_varlen_func(q, k, v, {LENGTHS}, dropout_p=0.0, softmax_scale=None, causal=False): pass\n"
FOURTH = f"def flash_attn_varlen_func(q, k, v, qv=None, {LENGTHS}, softmax_scale=None, causal=False): pass\n"
NO_CUTLASS = "import cutlass_of_nobody\n"
MISSING = "No module named 'cutlass_of_nobody'"
NO_FUNCTION = "it has no flash_attn_varlen_func: another package of this name, or a part of one"


PACKAGES: list[tuple[str | None, str | None, list[object]]] = [
    (SECOND, None, [True, False, {}]),
    (SECOND, FOURTH, [True, True, {}]),
    (None, FOURTH, [False, True, {}]),  # as `pip install --pre flash-attn-4` leaves it
    (None, NO_CUTLASS, [False, False, {"flash_attn": NO_FUNCTION, "flash_attn.cute": MISSING}]),
    ("", None, [False, False, {"flash_attn": NO_FUNCTION}]),
    ("raise ImportError('undefined symbol')", FOURTH, [False, False, {"flash_attn": "undefined symbol"}]),
    (SECOND, NO_CUTLASS, [True, False, {"flash_attn.cute": MISSING}]),
]
"""What is in flash_attn, in flash_attn.cute, and which of them are found."""


@pytest.mark.starts
def test_flash_attention_2_and_4_are_told_apart(tmp_path: Path) -> None:
    """They share a package's name, and a run with one alone ended in an ImportError in its first layer."""
    folders = [tmp_path / str(number) for number in range(len(PACKAGES))]
    for folder, (second, fourth, _) in zip(folders, PACKAGES, strict=True):
        for package, lines in (("flash_attn", second), ("flash_attn/cute", fourth)):
            (folder / package).mkdir(parents=True)
            if lines is not None:
                (folder / package / "__init__.py").write_text(lines)
        if fourth is None:
            (folder / "flash_attn/cute").rmdir()
    assert [*map(json.loads, behind_torch(ASK, folders))] == [found for *_, found in PACKAGES]
