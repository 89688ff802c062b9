"""The shipped training scripts: their flags are ones that we take, and a user's settings win over theirs."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from megatron.vlm.arguments import read_arguments
from tools.launch import _parser

ROOT = Path(__file__).parents[2]
SCRIPTS = ("scripts/train_internvl_chat_1_5.sh", "scripts/slurm/train.sbatch")
EVERYWHERE = ("PYTORCH_CUDA_ALLOC_CONF", "NCCL_NVLS_ENABLE", "OMP_NUM_THREADS")
OF_A_CLUSTER = ("TORCHINDUCTOR_CACHE_DIR",)
SETTINGS = (*EVERYWHERE, *OF_A_CLUSTER)
SPEAK = f'#!/bin/bash\nprintf "%s\\n" "$@" > $SAID\nenv | grep -E "^({"|".join(SETTINGS)})=" > $SAID.env || true\n'
"""Stands for python, srun and scontrol: says what it was called with."""


def called(script: str, folder: Path, *flags: str, **environment: str) -> tuple[list[str], dict[str, str]]:
    """The words of the script's last call, and the settings in its environment."""
    for name in ("python", "srun", "scontrol"):
        (folder / name).write_text(SPEAK)
        (folder / name).chmod(0o755)
    given = dict.fromkeys(("FROM", "DATA", "PACKS", "RUN_DIR", "SLURM_JOB_NODELIST"), "x")
    given |= dict.fromkeys(("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES"), "4")
    given |= {"SAID": str(folder / "said"), **environment}
    kept = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", script, *(flags or ("--seed", "5"))], cwd=ROOT, check=True, env={**kept, **given, "PATH": path}
    )
    settings = (line.split("=", 1) for line in (folder / "said.env").read_text().splitlines())
    return (folder / "said").read_text().splitlines(), dict(settings)


@pytest.mark.parametrize("script", SCRIPTS)
def test_its_flags_are_taken_and_overlap_what_can_be(script: str, tmp_path: Path) -> None:
    words, settings = called(script, tmp_path)
    flags = words[words.index("--") + 1 :]
    args = read_arguments(["--preset", "tiny", "--train-iters", "9", *flags]).args
    assert all((args.overlap_grad_reduce, args.overlap_param_gather, args.use_distributed_optimizer, args.bf16))
    assert args.seed == 5
    assert "--sequence-parallel" in flags  # without meaning on the one tensor-parallel rank here
    assert set(settings) == set(SETTINGS if "slurm" in script else EVERYWHERE)


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_the_user_has_set_stays(script: str, tmp_path: Path) -> None:
    _, settings = called(script, tmp_path, **dict.fromkeys(SETTINGS, "7"))
    assert settings == dict.fromkeys(SETTINGS, "7")


@pytest.mark.parametrize(("given", "folder"), [({}, "home/.cache"), ({"XDG_CACHE_HOME": "/scratch/me"}, "/scratch/me")])
def test_what_is_compiled_lies_where_all_nodes_find_it(given: dict[str, str], folder: str, tmp_path: Path) -> None:
    _, settings = called("scripts/slurm/train.sbatch", tmp_path, HOME="home", **{"XDG_CACHE_HOME": "", **given})
    assert settings["TORCHINDUCTOR_CACHE_DIR"] == f"{folder}/omnibal/torchinductor"


def test_the_port_of_a_job_does_not_follow_from_its_number(tmp_path: Path) -> None:
    """Below the ports that Linux gives away by itself, and one for all nodes: both steps of the job name it."""
    ports = []
    for _ in range(3):
        words, _ = called("scripts/slurm/train.sbatch", tmp_path)
        port = words[words.index("--rdzv-endpoint") + 1].rpartition(":")[2]
        assert 20000 <= int(port) < 32768
        ports.append(port)
    assert len({*ports}) > 1
    words, _ = called("scripts/slurm/train.sbatch", tmp_path, PORT="29500")
    assert words[words.index("--rdzv-endpoint") + 1].endswith(":29500")


def test_a_job_takes_the_one_command_and_a_container(tmp_path: Path) -> None:
    flags = ("--input", "a file.jsonl", "--workers", "8", "--", "--seed", "5")
    words, _ = called("scripts/slurm/train.sbatch", tmp_path, *flags, SRUN="--container-image=i", WITHIN="apptainer x")
    assert words[: words.index("tools/launch.py")] == [
        "--container-image=i", "--kill-on-bad-exit=1", "apptainer", "x", "python"
    ]  # fmt: skip
    assert words[words.index("--input") :][:4] == list(flags[:4])
    assert not {"--data", "--packs"} & {*words}
    assert words[-2:] == ["--seed", "5"]
    assert words.count("--") == 1


def test_a_variable_that_is_not_set_is_named_with_how_to_set_it(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "scripts/slurm/train.sbatch"], cwd=ROOT, capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"], "RUN_DIR": "r"},
    )  # fmt: skip
    assert "DATA: is not set: NAME=... sbatch scripts/slurm/train.sbatch" in done.stderr
    assert "or give --input FILES --" in done.stderr


@pytest.mark.parametrize(("node", "calls"), [(0, 2), (3, 1)])
def test_the_first_machine_of_a_trainjob_plans_and_all_train(node: int, calls: int, tmp_path: Path) -> None:
    """By the variables that Kubeflow's runtime for torch sets; the flags are the launcher's own."""
    _, job = yaml.safe_load_all((ROOT / "scripts/kubernetes/trainjob.yaml").read_text())
    trainer = job["spec"]["trainer"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/plan.json").touch()
    (tmp_path / "omnibal").write_text('#!/bin/bash\nprintf "%s\\n" "$@" END >> "$SAID"\n')
    (tmp_path / "omnibal").chmod(0o755)
    pet = {"NNODES": trainer["numNodes"], "NPROC_PER_NODE": trainer["numProcPerNode"], "NODE_RANK": node,
           "MASTER_ADDR": "omnibal-train-node-0-0", "MASTER_PORT": 29400}  # fmt: skip
    given = {f"PET_{name}": str(value) for name, value in pet.items()} | {"SAID": str(tmp_path / "said")}
    script = [word.replace("/work", str(tmp_path)) for word in trainer["args"]]
    subprocess.run(
        [*trainer["command"], *script], check=True, env={**given, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    )
    said = (tmp_path / "said").read_text().split("END\n")[:-1]
    assert len(said) == calls
    for words in said:
        assert words.startswith("launch\n")
        parsed = _parser().parse_args(words.split()[1:])
        assert (parsed.nnodes, parsed.nproc_per_node) == (4, 8)
        assert parsed.rdzv_endpoint == "omnibal-train-node-0-0:29400"
        assert parsed.dry_run == (words != said[-1])


def test_the_quickstart_shows_no_figures_of_other_epochs(tmp_path: Path) -> None:
    (tmp_path / ".epochs").write_text("3\n")
    words, environment = ["bash", "scripts/quickstart.sh", str(tmp_path)], {**os.environ, "EPOCHS": "6"}
    ended = subprocess.run(words, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    said = f"error: {tmp_path} has runs of 3 epochs, not of 6: name another output folder\n"
    assert (ended.returncode, ended.stderr) == (2, said)
