"""The commands of the documents, block by block, run as they stand there by a user with a small model and corpus.

Only numbers are changed, of devices that a machine of the tests does not have, and launchers estimate costs, because
measuring takes half a minute. Commands that need something else are in `ELSEWHERE`, with what runs them.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import ROOT, environment, tool
from tests.system.families import save_model

DOCUMENTS = sorted(path for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")] if "```bash" in path.read_text())
ELSEWHERE = {
    r"bash scripts/(quickstart|test|setup|mutate)\.sh": "what the tests themselves are started with, and minutes long",
    r"docker ": "needs Docker",
    r"omnibal pack --sizes many": "of more samples than fit: tests/unit/packing/test_any_number.py",
    r"omnibal prove": "with a module of the user's: tests/unit/prove/test_prove_tool.py",
    r"python -m pip install --dry-run": "needs a network",
    r".*train_internvl_chat_1_5\.sh": "eight ranks: tests/unit/test_scripts.py",
    r"python benchmarks/gpu\.py": "needs a GPU: tests/unit/test_gpu_benchmark.py",
    r"omnibal convert --to-hf run/checkpoints --output-dir tuned --check": "of a run that saves",
    r".*--download": "needs the hub: tests/unit/launch/test_weights.py",
    r".*internvl_sft_1\.2M\.json": "needs their file: tests/unit/packing/test_corpus.py",
    r"python benchmarks/peer_waiting\.py|DIR/bin/python": "installs other trainers, and tests with them",
    r".*s3://": "needs a store: tests/system/test_stored.py, tests/unit/data/test_stores.py",
    r"swift sft": "needs ms-swift: tests/unit/integrations/test_ms_swift.py",
    r"\w+=\$\(sbatch|(\w+=\S+ )*sbatch|flags=\(": "needs Slurm: tests/system/test_slurm.py",
}
SMALLER = {
    r"omnibal level packs --data-parallel-size 16 --iteration 12000": "omnibal level packs --data-parallel-size 2",
    r"--nproc-per-node 8": "--nproc-per-node 2",
    r"--tensor-model-parallel-size 4(?=.*-- )": "--tensor-model-parallel-size 1",
    r"--micro-batches 16": "--micro-batches 2",
    r"--num-microbatches 16": "--num-microbatches 2",
    r"--data-parallel-size 8": "--data-parallel-size 1",
    r"--max-tokens 131072 --llm-budget 16384": "--max-tokens 1024 --llm-budget 64",
    r"--workers 16": "--workers 2",
    r"examples/train_ddp\.py": "examples/train_ddp.py --steps 2",
    r"omnibal launch": "omnibal launch --analytic h100",
    r"omnibal profile (?!.*--analytic)": "omnibal profile --steps 1 ",
}
MODELS = ("HF_FOLDER", "InternVL3_5-8B-HF", "InternVL-Chat-V1-5", "InternVL3-8B-hf", "internvl-chat-1.5")
"""Names under which documents speak of a user's model."""
BEGIN_WITH_NOTHING = ("README.md", "first-run.md", "models.md", "loops.md", "long-context.md")
BUDGETS = ("--vit-budget", 40, "--llm-budget", 320)


def blocks() -> Iterator[tuple[str, list[str]]]:
    """Name and command lines of every block of bash, continued lines joined; numbers made smaller."""
    for document in DOCUMENTS:
        for number, block in enumerate(re.findall(r"```bash\n(.*?)```", document.read_text(), re.DOTALL)):
            lines = (
                re.sub(r"\s+", " ", line.partition("#")[0]).strip() for line in block.replace("\\\n", " ").split("\n")
            )
            chosen = [line for line in lines if line and not any(re.match(elsewhere, line) for elsewhere in ELSEWHERE)]
            for large, small in SMALLER.items():
                chosen = [re.sub(large, small, line) for line in chosen]
            if chosen:
                yield f"{document.name}-{number}", chosen


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a user who has conversations, images, a tokenizer and a model."""
    folder = tmp_path_factory.mktemp("user")
    for name in ("benchmarks", "examples", "scripts", "tools"):
        (folder / name).symlink_to(ROOT / name)
    tool("make_demo_data.py", "--output-dir", folder / "demo", "--samples", 24, "--heldout-samples", 4)
    (folder / "images").symlink_to("demo")
    for name, source in (("chat.jsonl", "train.jsonl"), ("tokenizer.model", "tokenizer.model")):
        shutil.copyfile(folder / "demo" / source, folder / name)
    save_model("internvl3.5", folder / "model", folder / "tokenizer.model")
    for name in MODELS:
        (folder / name).symlink_to("model")
    (folder / "bin").mkdir()
    commands = {"python": "", "omnibal": f"{ROOT}/tools/__main__.py", "torchrun": "-m torch.distributed.run"}
    for command, words in commands.items():
        file = folder / "bin" / command
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/warm_python.py {words} "$@"\n')
        file.chmod(0o755)
    write_dataset(folder / "HF_DATASET/train", folder / "demo")
    return folder


def write_dataset(folder: Path, demo: Path) -> None:
    """The demo's conversations as the datasets library saves them to disk, with the images inside."""
    pyarrow = pytest.importorskip("pyarrow")
    rows = [json.loads(line) for line in (demo / "train.jsonl").read_text().splitlines()]
    named = [image if isinstance(image := row.get("image") or [], list) else [image] for row in rows]
    images = [[{"bytes": (demo / name).read_bytes(), "path": name} for name in names] for names in named]
    table = pyarrow.table({"conversations": [row["conversations"] for row in rows], "images": images})
    folder.mkdir(parents=True)
    file = folder / "data-00000-of-00001.arrow"
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)


@pytest.fixture(scope="module")
def owner(user: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same one later: with a dataset, packs, and a run."""
    folder = tmp_path_factory.mktemp("owner") / "user"
    shutil.copytree(user, folder, symlinks=True)
    source = ("--input", folder / "chat.jsonl", "--image-root", folder / "images", "--model", folder / "model")
    tool("preprocess_data.py", *source, "--output-dir", folder / "data")
    tool("pack_data.py", "--data", folder / "data", *BUDGETS, "--micro-batches", 2, "--output-dir", folder / "packs")
    ranks = ("--nproc-per-node", 2, "--pipeline-model-parallel-size", 2, "--analytic", "a100", "--from-scratch")
    work = ("--model", folder / "model", "--data", folder / "data", "--packs", folder / "packs")
    how = ("--run-dir", folder / "run", "--epochs", 1, "--no-save")
    tool("launch.py", *work, *ranks, *how, "--", "--lr", "1e-3")
    for file in ("plan.json", "profile.json"):
        shutil.copyfile(folder / "run" / file, folder / file)
    for file, column in (("a.json", [3, 1, 4]), ("b.json", [5, 2])):
        (folder / file).write_text(json.dumps([{"vit_num": tiles, "token_num": 90 * tiles} for tiles in column]))
    for name, same in (("dataset", "data"), ("PACKS", "packs"), ("RUN", "run")):
        (folder / name).symlink_to(same)
    return folder


@pytest.mark.starts
@pytest.mark.parametrize(("name", "lines"), [pytest.param(*block, id=block[0]) for block in blocks()])
def test_every_command_of_the_documents_runs(
    name: str, lines: list[str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    made = request.getfixturevalue("user" if name.startswith(BEGIN_WITH_NOTHING) else "owner")
    folder = tmp_path / "user"
    shutil.copytree(made, folder, symlinks=True)
    found = environment(PATH=f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for line in lines:
        done = subprocess.run(["bash", "-c", line], cwd=folder, env=found, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
