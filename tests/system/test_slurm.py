"""The shipped batch scripts, by the commands of docs/cluster.md, on a real Slurm of one node.

What is preempted, or near its time limit, ends with the weights of an undisturbed run. All jobs' Python has its imports
behind it; the test that waits for Slurm's own clock takes a minute more, and runs with OMNIBAL_SLURM_CLOCK=1 only.
"""

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatron.vlm.hf.checkpoint import OurCheckpoint
from omnibal_ext.plan import Plan
from omnibal_ext.run_metrics import training_intervals
from tests.programs import ROOT, environment, warm_interpreter
from tests.slurm_cluster import Cluster, missing, slurm, until

REASON = missing()
pytestmark = [pytest.mark.starts, pytest.mark.skipif(REASON is not None, reason=f"no Slurm: {REASON}")]
PYTHON = str(ROOT / "tests/warm_python.py")
SAMPLES, ITERATIONS = 60, 24
SIGNALLED = {"COLD_MODULES": "omnibal_ext.launch.torchrun", "PYTHON_EXEC": PYTHON}
"""The launcher hands a signal to the children of torchrun, which therefore is no fork of another process."""
ODD = "a b  'c' \"d\" $(touch oh) `touch oh` \\ * é"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm(tmp_path_factory.mktemp("slurm"), environment(PYTHON=warm_interpreter())) as running:
        yield running


def documented(cluster: Cluster, under: str, changes: dict[str, object], **variables: str) -> str:
    """Run the commands under a title of docs/cluster.md, with other values for theirs; the last job's number."""
    section = (ROOT / "docs/cluster.md").read_text().partition(f"\n## {under}\n")[2]
    (commands, *_) = re.findall(r"```(?:ba)?sh\n(.*?)```", section, re.DOTALL)
    lacking = [value for value in changes if value not in commands]
    assert not lacking, f"docs/cluster.md, {under}: no {lacking} in its commands"
    commands = re.sub("|".join(map(re.escape, changes)), lambda found: str(changes[found[0]]), commands)
    return cluster.run("bash", "-euc", commands, **variables).rsplit(maxsplit=1)[-1]


@pytest.fixture(scope="module")
def folder(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Demo conversations, preprocessed by an array of two tasks and a merge, packed by a job."""
    folder = tmp_path_factory.mktemp("scratch")
    demo = shlex.join([PYTHON, "tools/make_demo_data.py", "--output-dir", f"{folder}/demo", "--samples", str(SAMPLES)])
    made = cluster.submit("--output", folder / "%x-%j.log", "--wrap", demo)
    assert cluster.wait(made) == {"COMPLETED"}, logs(folder)
    own = f"--cpus-per-task=2 --output={folder}/%x-%j.log "
    small = f"--chat-template internlm2-chat --tile-size 32 --tokens-per-tile 4 --tokenizer-model {folder}/demo/"
    packed = documented(cluster, "Data", {
        "data/*.jsonl": f"{folder}/demo/train*.jsonl", "/images": f"{folder}/demo", "/scratch": folder,
        "--model InternVL-Chat-V1-5 --tokenizer-model ": small, "--array=0-15": "--array=0-1",
        "omnibal pack": f"{PYTHON} tools/pack_data.py",
        "(sbatch ": f"(sbatch {own}", "\nsbatch ": f"\nsbatch {own}",
        "--vit-budget auto": "--vit-budget 16", "--llm-budget auto": "--llm-budget 160",
        "--micro-batches 16 --data-parallel-size 2": "--micro-batches 2",
    })  # fmt: skip
    assert cluster.wait(packed) == {"COMPLETED"}, logs(folder)
    return folder


def logs(folder: Path) -> str:
    return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(folder.glob("*.log")))


def run_dir(folder: Path, name: str) -> Path:
    return folder / ODD / name


def train(cluster: Cluster, folder: Path, name: str, save_interval: int, *sbatch: object, **variables: str) -> str:
    """Submit two tasks, one pipeline rank each, by one plan for all runs."""
    run, alone = run_dir(folder, name), run_dir(folder, "undisturbed")
    run.mkdir(parents=True)
    for made in ("profile.json", "plan.json", "plan.inputs.json"):
        if (alone / made).exists():
            shutil.copy(alone / made, run)
    small = "PRESET=tiny TENSOR=1 PIPELINE=2 EPOCHS= GPUS_PER_NODE=1"
    shape = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=8", "--job-name", name)
    flags = (
        "--train-iters", ITERATIONS, "--lr", "1e-3", "--log-interval", 1, "--tensorboard-dir", folder / f"{name} {ODD}",
    )  # fmt: skip
    return documented(cluster, "Training", {
        "FROM=InternVL-Chat-V1-5": f"SAVE_INTERVAL={save_interval} {small}",
        "RUN_DIR=/scratch/run": f"RUN_DIR={shlex.quote(str(run))}", "/scratch": folder,
        "--nodes=4": words(*shape, "--output", folder / "%x.log", *sbatch), "--lr 2e-5": words(*flags),
    }, **variables)  # fmt: skip


def words(*given: object) -> str:
    return shlex.join(map(str, given))


def saved(folder: Path, name: str) -> int:
    tracker = run_dir(folder, name) / "checkpoints/latest_checkpointed_iteration.txt"
    return int(tracker.read_text() or 0) if tracker.exists() else 0


def result(folder: Path, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    assert saved(folder, name) == ITERATIONS, logs(folder)
    losses = [line["loss"] for line in training_intervals(run_dir(folder, name) / "metrics.jsonl")]
    assert len(losses) == ITERATIONS
    checkpoint = OurCheckpoint(run_dir(folder, name) / "checkpoints")
    return losses, {weight: checkpoint.tensor(weight) for weight in checkpoint.weights}


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    job = train(cluster, folder, "undisturbed", ITERATIONS // 2)
    assert cluster.wait(job) == {"COMPLETED"}, logs(folder)
    return result(folder, "undisturbed")


def check_equal(
    one: tuple[list[float], dict[str, torch.Tensor]], other: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


def test_an_array_a_merge_and_packing_are_jobs_that_follow_each_other(folder: Path) -> None:
    dataset = json.loads((folder / "dataset/manifest.json").read_text())
    packs = json.loads((folder / "packs/manifest.json").read_text())
    assert dataset["samples"] == packs["samples"] == SAMPLES
    shards = [re.findall(r"shard +(\d/\d)", path.read_text()) for path in folder.glob("omnibal-preprocess-*.log")]
    assert sorted(shards) == [[], ["0/2"], ["1/2"]]


@pytest.mark.usefixtures("undisturbed")
def test_two_tasks_train_by_one_plan_and_words_arrive_as_they_were_written(folder: Path) -> None:
    run = run_dir(folder, "undisturbed")
    assert Plan.load(run / "plan.json").pipeline_model_parallel_size == 2
    (argument,) = re.findall(r"tensorboard_dir \.+ (.*)", (run / "megatron-arguments.txt").read_text())
    assert argument == str(folder / f"undisturbed {ODD}")
    assert any(Path(argument).iterdir())
    assert not (ROOT / "oh").exists()


def test_a_job_that_is_signalled_ends_with_the_weights_of_an_undisturbed_one(
    cluster: Cluster, folder: Path, undisturbed: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    """By the signal that `#SBATCH --signal=B:USR1@180` asks of Slurm, sent by us."""
    job = signalled(cluster, folder, "disturbed")
    assert cluster.wait(job) == {"COMPLETED"}, logs(folder)
    assert cluster.job(job)["Restarts"] == "1", logs(folder)
    check_equal(result(folder, "disturbed"), undisturbed)


@pytest.mark.long
def test_a_job_that_is_then_preempted_does_too(
    cluster: Cluster, folder: Path, undisturbed: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    job = signalled(cluster, folder, "preempted")
    before = saved(folder, "preempted")
    until(lambda: saved(folder, "preempted") > before, 240)
    urgent = cluster.submit("--partition=high", "--exclusive", "--output=/dev/null", "--wrap", "true")
    assert cluster.wait(urgent) == {"COMPLETED"}
    assert cluster.wait(job) == {"COMPLETED"}, logs(folder)
    assert cluster.job(job)["Restarts"] == "2", logs(folder)
    check_equal(result(folder, "preempted"), undisturbed)


def signalled(cluster: Cluster, folder: Path, name: str) -> str:
    """A job that was told to end amid its iterations, has saved, and is queued again."""
    job, log = train(cluster, folder, name, 6, **SIGNALLED), folder / f"{name}.log"  # slow, as it saves often
    until(lambda: log.exists() and "after iteration 3/" in log.read_text(), 240)
    cluster.run("scancel", "--batch", "--signal=USR1", job)
    until(lambda: cluster.job(job)["Restarts"] == "1", 120)
    assert "saving a checkpoint, then job" in log.read_text()
    assert 3 <= saved(folder, name) < ITERATIONS, logs(folder)
    return job


def test_one_command_trains_a_folder_on_conversations_and_goes_on(cluster: Cluster, folder: Path) -> None:
    """Two tasks: the first preprocesses, packs, converts and plans; the second job trains the other half."""
    pytest.importorskip("transformers")
    from tests.system.families import save_model

    save_model("qwen3-vl", folder / "model", folder / "demo/tokenizer.model")
    log, run, losses = folder / "one command.log", folder / "one", []
    shape = ("--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=0", "--cpus-per-task=8", "--output", log)
    for more in ("--exit-interval 2", ""):
        job = documented(cluster, "One command", {
            "FROM=/models/InternVL3_5-8B-HF": f"TENSOR=1 PIPELINE=1 EPOCHS= GPUS_PER_NODE=1 FROM={folder}/model",
            "/scratch/run": run, "--nodes=4": words(*shape), "/data/chat.jsonl": folder / "demo/train.jsonl",
            "/images": folder / "demo", "--workers 32": "--workers 2 --analytic a100",
            "--lr 2e-5": f"--lr 1e-3 --train-iters 4 --log-interval 1 {more}",
        })  # fmt: skip
        assert cluster.wait(job) == {"COMPLETED"}, logs(folder)
        losses.append([line["loss"] for line in training_intervals(run / "metrics.jsonl")])
    assert [len(each) for each in losses] == [2, 4]
    assert losses[1][:2] == losses[0]


@pytest.mark.skipif("OMNIBAL_SLURM_CLOCK" not in os.environ, reason="takes minutes: set OMNIBAL_SLURM_CLOCK=1")
def test_slurm_itself_sends_the_signal_before_the_time_limit(cluster: Cluster, folder: Path) -> None:
    """It looks at its clock every half minute, and counts to a minute: with two minutes it sends after 10 to 40 s."""
    job = train(cluster, folder, "clocked", 1, "--time=2", "--signal=B:USR1@80", **SIGNALLED)
    until(lambda: cluster.job(job)["Restarts"] == "1", 300)
    assert "saving a checkpoint, then job" in (folder / "clocked.log").read_text()
    cluster.run("scancel", job)
