"""What a user sees of a run: our lines, not Megatron's list of arguments or warnings of packages that are optional."""

import os
import subprocess
import sys
from pathlib import Path

from examples.demo.data import make_demo_data
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.preprocessing.job import open_job
from megatron.vlm.preprocessing.preprocess import preprocess
from megatron.vlm.preprocessing.samples import Recipe
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.options import PackOptions

ROOT = Path(__file__).parents[2]


def test_our_lines_are_seen_without_scrolling(tmp_path: Path) -> None:
    """One process, three iterations; the list of arguments lies beside the metrics, TensorBoard has its file."""
    make_demo_data(tmp_path, samples=24, heldout_samples=1, seed=3)
    tiling = Tiling(32, max_tiles=32)
    recipe = Recipe(tmp_path, tmp_path / "tokenizer.model", "internlm2-chat", tiling, tokens_per_tile=4)
    preprocess(open_job([tmp_path / "train.jsonl"], recipe, tmp_path / "data"))
    built_from = {"data": {"manifest": ChatDataset(tmp_path / "data").manifest}}
    options = PackOptions(vit_budget=40, llm_budget=400, micro_batches=2)
    build_index(Corpus.of_dataset(tmp_path / "data"), tmp_path / "packs", options, built_from)
    flags = f"--data {tmp_path}/data --packs {tmp_path}/packs --metrics-file {tmp_path}/run/metrics.jsonl"
    flags += f" --tensorboard-dir {tmp_path}/board --global-batch-size 2 --train-iters 3 --lr 1e-3 --log-interval 1"
    flags += " --exit-interval 3 --from-scratch"
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "megatron.vlm.pretrain", "--preset", "tiny", *flags.split()],
        env={**os.environ, **alone, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines() + done.stderr.splitlines()
    assert len(lines) < 100
    assert not [line for line in lines if "not installed" in line]
    # Megatron's estimates know the language model alone.
    assert not [line for line in lines if "in billions" in line or "Theoretical memory" in line]
    assert len([line for line in lines if " after iteration " in line and "samples/s" in line]) == 3
    assert "Megatron's own and untested here: --exit-interval (docs/flags.md)" in lines
    arguments = (tmp_path / "run/megatron-arguments.txt").read_text()
    assert "adam_beta2 ......" in arguments
    assert list((tmp_path / "board").glob("events.*"))
