"""What a user sees of a run: our lines, not Megatron's list of arguments or warnings of packages that are optional."""

from pathlib import Path

from omnibal_ext.packing.options import PackOptions
from tests.demo import demo_dataset, demo_packs
from tests.programs import fresh_python


def test_our_lines_are_seen_without_scrolling(tmp_path: Path) -> None:
    """One process, three iterations; the list of arguments lies beside the metrics, TensorBoard has its file."""
    data = demo_dataset(tmp_path, tmp_path / "data", 24)
    demo_packs(data, tmp_path / "packs", PackOptions(vit_budget=40, llm_budget=400, micro_batches=2))
    flags = f"--data {tmp_path}/data --packs {tmp_path}/packs --metrics-file {tmp_path}/run/metrics.jsonl"
    flags += f" --tensorboard-dir {tmp_path}/board --global-batch-size 2 --train-iters 3 --lr 1e-3 --log-interval 1"
    flags += " --exit-interval 3 --from-scratch"
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = fresh_python("-m", "megatron.vlm.pretrain", "--preset", "tiny", *flags.split(), **alone)
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
