"""Images are decoded by one rank of a tensor-parallel group; all see the same pixels, of the right samples."""

from pathlib import Path

from examples.demo.data import make_demo_data
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.preprocessing.job import open_job
from megatron.vlm.preprocessing.preprocess import preprocess
from megatron.vlm.preprocessing.samples import Recipe
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.options import PackOptions
from tests.distributed.conftest import run_program


def test_one_rank_decodes_and_all_see_the_pixels(tmp_path: Path) -> None:
    make_demo_data(tmp_path, samples=24, heldout_samples=1, seed=5)
    recipe = Recipe(tmp_path, tmp_path / "tokenizer.model", "internlm2-chat", Tiling(32, max_tiles=12), 4)
    manifest = preprocess(open_job([tmp_path / "train.jsonl"], recipe, tmp_path / "data"))
    built_from = {"data": {"manifest": manifest}}
    options = PackOptions(vit_budget=20, llm_budget=200)
    index = build_index(Corpus.of_dataset(tmp_path / "data"), tmp_path / "packs", options, built_from)[0]
    result = run_program("tests.distributed.arrival", 2, str(tmp_path / "data"), str(tmp_path / "packs"))
    assert len(result) == index.num_packs + 1
    assert set(result.values()) == {0.0}
