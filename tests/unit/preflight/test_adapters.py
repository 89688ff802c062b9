"""What the table of checks says of adapters."""

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.vlm.preflight.run import CHECKS
from omnibal_ext.architectures.presets import preset

CHECK: Any = dict(CHECKS)["adapters"]


@pytest.mark.parametrize(
    ("model", "rank", "targets", "numbers", "none"),
    [
        # 3 layers, 128 wide, 352 inside: query and output of 128, key and value of 64 rows
        ("tiny", 4, None, 3 * 4 * (2 * 256 + 2 * 192 + 3 * 480), ""),
        # 48 layers, 2048 wide, 32 heads and 4 groups of 128; of the mixture the attention alone
        ("internvl3.5-30b-a3b", 2, ["llm"], 48 * 2 * (2 * 6144 + 2 * 2560), "; experts and their routers have none"),
        ("internvl3.5-30b-a3b", 2, ["projector"], 2 * (4096 + 2048 + 2048 + 2048), ""),
    ],
)
def test_numbers_that_are_trained_are_said(model: str, rank: int, targets: Any, numbers: int, none: str) -> None:
    said = f"rank {rank} in {(targets or ['llm'])[0]}: {numbers:,} numbers are trained, nothing else{none}"
    assert CHECK(start(model, rank, targets)) == said
    assert CHECK(start(model, None, None)) is None


def start(model: str, rank: int | None, targets: Any) -> Any:
    args = Namespace(lora_rank=rank, lora_alpha=None, lora_targets=targets)
    return SimpleNamespace(inputs=SimpleNamespace(args=args, architecture=preset(model)))
