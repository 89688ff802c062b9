"""Any layout gives the loss and the gradients of one process, to 1e-5 relative."""

from pathlib import Path

import pytest

from tests.distributed.conftest import run_program

TOLERANCE = 1e-5

# name, ranks, tensor, pipeline, model, further flags; with two pipeline ranks every cut is run, kept and recomputed
LAYOUTS = [
    ("every cut", 2, 1, 2, "small", ()),
    ("tensor parallel", 2, 2, 1, "small", ()),
    ("sequence parallel", 2, 2, 1, "small", ("--sequence-parallel",)),
    ("data parallel", 2, 1, 1, "small", ()),
    ("every cut, tensor parallel", 4, 2, 2, "small", ()),
    ("every cut, data parallel", 4, 1, 2, "small", ()),
    ("norm over all heads, tensor parallel", 2, 2, 1, "wide_norm", ()),
]


@pytest.mark.parametrize(
    ("ranks", "tensor", "pipeline", "model", "flags"),
    [layout[1:] for layout in LAYOUTS],
    ids=[layout[0] for layout in LAYOUTS],
)
def test_layout_equals_one_process(
    references: dict[str, Path], ranks: int, tensor: int, pipeline: int, model: str, flags: tuple[str, ...]
) -> None:
    result = run_program(
        "tests.distributed.parity", ranks, str(tensor), str(pipeline), str(references[model]), model, *flags
    )
    assert len(result) == (14 if pipeline == 2 else 2)
    worst = max(result, key=lambda label: result[label])
    assert result[worst] < TOLERANCE, f"{worst}: {result[worst]}"


def test_a_wrong_weight_is_noticed(references: dict[str, Path]) -> None:
    """The comparison itself can fail: other weights than the reference's give other gradients."""
    result = run_program("tests.distributed.parity", 1, "1", "1", str(references["small"]), "small", "--seed", "8")
    assert min(result.values()) > 100 * TOLERANCE
