"""Images are decoded by one rank of a tensor-parallel group; all see the same pixels, of the right samples."""

from pathlib import Path

from omnibal_ext.packing.options import PackOptions
from tests.demo import demo_dataset, demo_packs
from tests.distributed.conftest import run_program


def test_one_rank_decodes_and_all_see_the_pixels(tmp_path: Path) -> None:
    data = demo_dataset(tmp_path, tmp_path / "data", 24, seed=5, max_tiles=12)
    index = demo_packs(data, tmp_path / "packs", PackOptions(vit_budget=20, llm_budget=200))
    result = run_program("tests.distributed.arrival", 2, str(tmp_path / "data"), str(tmp_path / "packs"))
    assert len(result) == index.num_packs + 1
    assert set(result.values()) == {0.0}
