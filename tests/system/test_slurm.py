"""The shipped batch scripts on a real Slurm of one node: what is preempted or out of time ends as if undisturbed.

The runs of training take minutes each, and are left out unless OMNIBAL_SLURM_TRAINING is set.
"""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.vlm.hf.checkpoint import OurCheckpoint
from omnibal_ext.plan import Plan
from tests.slurm_cluster import Cluster, missing, slurm, until

REASON = missing()
pytestmark = [pytest.mark.starts, pytest.mark.skipif(REASON is not None, reason=f"no Slurm: {REASON}")]
SCRIPTS = Path(__file__).parents[2] / "scripts/slurm"
SAMPLES, ITERATIONS = 60, 12


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def wrap(*words: object) -> str:
    return f"--wrap={shlex.join(map(str, words))}"


@pytest.fixture(scope="module")
def folder(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demo conversations, preprocessed by an array of two tasks and a merge, packed by a job: docs/cluster.md."""
    folder, log = tmp_path_factory.mktemp("work with spaces"), "--output"
    own = (log, folder / "%x-%A-%a.log", "--cpus-per-task=2", "--mem=0")
    python = {"PYTHON": sys.executable}
    demo = wrap(sys.executable, "tools/make_demo_data.py", "--output-dir", folder / "demo", "--samples", SAMPLES)
    made = cluster.submit(*own, demo)
    flags = ("--input", folder / "demo/train.jsonl", "--image-root", folder / "demo", "--tokenizer-model",
             folder / "demo/tokenizer.model", "--chat-template", "internlm2-chat", "--tile-size", 32,
             "--tokens-per-tile", 4, "--output-dir", folder / "data")  # fmt: skip
    script = SCRIPTS / "preprocess.sbatch"
    array = cluster.submit(*own, f"--dependency=afterok:{made}", "--array=0-1", script, *flags, **python)
    merge = cluster.submit(*own, f"--dependency=afterok:{array}", script, "--merge", *flags, **python)
    pack = wrap(sys.executable, "tools/pack_data.py", "--data", folder / "data", "--method", "isf", "--vit-budget", 40,
                "--llm-budget", 320, "--micro-batches", 2, "--output-dir", folder / "packs")  # fmt: skip
    packed = cluster.submit(*own, f"--dependency=afterok:{merge}", pack)
    assert cluster.wait(packed) == {"COMPLETED"}, logs(folder)
    return folder


def logs(folder: Path) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.log")))


def train(cluster: Cluster, folder: Path, name: str, *more: object) -> str:
    """Submit two tasks, one pipeline rank each."""
    environment = {"PRESET": "tiny", "DATA": folder / "data", "PACKS": folder / "packs", "RUN_DIR": folder / name,
                   "TENSOR": 1, "PIPELINE": 2, "EPOCHS": "", "GPUS_PER_NODE": 1, "SAVE_INTERVAL": 4,
                   "PYTHON": sys.executable}  # fmt: skip
    shape = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=8", "--mem=0", "--time=30")
    flags = ("--train-iters", ITERATIONS, "--lr", "1e-3", "--log-interval", 1, "--seed", 7)
    return cluster.submit(
        *shape, "--job-name", name, "--output", folder / "%x.log", SCRIPTS / "train.sbatch", *flags, *more,
        **{variable: str(value) for variable, value in environment.items()},
    )  # fmt: skip


def saved(folder: Path, name: str) -> int:
    """The newest checkpoint of a run."""
    tracker = folder / name / "checkpoints/latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    assert saved(folder, name) == ITERATIONS, logs(folder)
    checkpoint = OurCheckpoint(folder / name / "checkpoints")
    return {weight: checkpoint.tensor(weight) for weight in checkpoint.weights}


trains = pytest.mark.skipif(
    "OMNIBAL_SLURM_TRAINING" not in os.environ, reason="takes minutes a run: set OMNIBAL_SLURM_TRAINING=1"
)


def test_an_array_a_merge_and_packing_are_jobs_that_follow_each_other(folder: Path) -> None:
    dataset = json.loads((folder / "data/manifest.json").read_text())
    packs = json.loads((folder / "packs/manifest.json").read_text())
    assert dataset["samples"] == packs["samples"] == SAMPLES
    assert {path.name for path in folder.glob("omnibal-preprocess-2-*.log")} == {
        f"omnibal-preprocess-2-{task}.log" for task in (0, 1)
    }


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, folder: Path) -> dict[str, torch.Tensor]:
    job = train(cluster, folder, "undisturbed")
    assert cluster.wait(job) == {"COMPLETED"}, logs(folder)
    return weights(folder, "undisturbed")


def is_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@trains
def test_two_tasks_train_by_one_plan(undisturbed: dict[str, torch.Tensor], folder: Path) -> None:
    assert Plan.load(folder / "undisturbed/plan.json").pipeline_model_parallel_size == 2
    assert undisturbed


@trains
def test_a_preempted_job_ends_with_the_weights_of_an_undisturbed_one(
    cluster: Cluster, folder: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    job = train(cluster, folder, "preempted")
    until(lambda: saved(folder, "preempted") >= 4, 240)
    urgent = cluster.submit("--partition=high", "--exclusive", "--output=/dev/null", wrap("true"))
    assert cluster.wait(urgent) == {"COMPLETED"}
    until(lambda: cluster.job(job)["Restarts"] == "1", 60)
    assert cluster.wait(job) == {"COMPLETED"}, logs(folder)
    assert is_equal(weights(folder, "preempted"), undisturbed)


@trains
def test_usr1_before_the_time_limit_saves_requeues_and_resumes(
    cluster: Cluster, folder: Path, undisturbed: dict[str, torch.Tensor]
) -> None:
    """Slurm sends USR1 to the batch script, as `#SBATCH --signal=B:USR1@180` asks for; here we do."""
    job = train(cluster, folder, "limited", "--save-interval", 1000)
    log = folder / "limited.log"
    until(lambda: log.exists() and "after iteration 3/" in log.read_text(), 240)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    until(lambda: cluster.job(job)["Restarts"] == "1", 120)
    assert 0 < saved(folder, "limited") < ITERATIONS, logs(folder)
    assert cluster.wait(job) == {"COMPLETED"}, logs(folder)
    assert "saving a checkpoint, then job" in log.read_text()
    assert is_equal(weights(folder, "limited"), undisturbed)


@trains
def test_arguments_arrive_as_they_were_written(cluster: Cluster, folder: Path) -> None:
    """Refused by name, so nothing trains: the flag's words are those that were given."""
    odd = "a b  'c' \"d\" $(touch oh) `id` \\ *"
    job = train(cluster, folder, "quoted", "--data-path", odd)
    assert cluster.wait(job) == {"FAILED"}
    assert not (Path.cwd() / "oh").exists()
    report = (folder / "quoted.log").read_text()
    assert "--data-path" in report
    assert json.dumps(odd) or odd in report
