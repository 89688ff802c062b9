"""Dropout under recomputation, tensor and sequence parallelism: drawn alike where it must be, and nowhere else."""

from pathlib import Path

from tests.distributed.conftest import run_program


def test_layouts_draw_alike_and_so_does_a_tower_beside_the_pipeline(tmp_path: Path) -> None:
    """In every mode, kept or run again, trained or frozen and ahead; drop path also where ranks share a pack."""
    program, answers = "tests.distributed.beside_draws", tmp_path / "answers"
    losses = run_program(program, 1, "answers", str(answers))
    assert len(set(losses.values())) == 4  # frozen parts draw as trained ones do, and no iteration as another
    found = run_program(program, 2, "compare", str(answers))
    assert len(found) == (1 + 3) + (1 + 2)
    shared = run_program(program, 4, "compare", str(answers), "--sequence-parallel")
    assert len(shared) == len(found)
    assert not {way: far for way, far in (found | shared).items() if not far < 1e-5}


def test_masks_are_alike_on_ranks_that_hold_the_same_and_differ_on_others() -> None:
    result = run_program("tests.distributed.masks", 2)
    assert len(result) == 6 * 5 + 1
    assert {what: share for what, share in result.items() if share} == {}
