"""The Dockerfile: a public base, versions that fit each other and what we ask for, an import at its end."""

import re
import shlex
from importlib.metadata import requires
from itertools import pairwise

from packaging.requirements import Requirement
from packaging.version import Version

from megatron.vlm.arguments import SPLITS_SINCE
from tests.programs import ROOT

LINES = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
STEPS = [line for line in LINES if line and not line.startswith("#")]
PINNED = dict(re.findall(r"(\S+)==([\d.]+)", "\n".join(STEPS)))


def test_pinned_versions_are_ones_that_we_take() -> None:
    """Zero-bubble schedules run in the project's own image."""
    ours = {found.name: found for line in requires("omnibal") or () if not (found := Requirement(line)).extras}
    assert ours["torch"].specifier.contains(PINNED["torch"])
    assert Version(PINNED["transformer-engine"]) >= Version(SPLITS_SINCE)
    assert PINNED["transformer-engine"] == PINNED["transformer-engine-torch"]


def test_the_base_is_public_and_of_the_cuda_that_torch_is_built_for() -> None:
    """A devel image: Transformer Engine's extension is compiled where there is no wheel for this torch."""
    (base,) = (line.split()[1] for line in STEPS if line.startswith("FROM"))
    found = re.fullmatch(r"nvidia/cuda:(\d+)\.\d+\.\d+-cudnn-devel-ubuntu24\.04", base)
    assert found
    assert found[1] == "13"


def test_every_step_has_its_reason_and_the_last_imports_the_trainer() -> None:
    for before, line in pairwise(LINES):
        if line.startswith(("RUN apt-get", "RUN python3 -m venv", "RUN printf", "RUN MAX_JOBS", "RUN python -c")):
            assert before.startswith("#"), line
    assert shlex.split(STEPS[-1]) == ["RUN", "python", "-c", "import megatron.vlm.pretrain"]


def test_what_it_copies_is_there() -> None:
    copied = [word for line in STEPS if line.startswith("COPY") for word in line.split()[1:-1]]
    assert {"setup.py", "megatron", "omnibal_ext", "tools", "scripts"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)


def test_its_settings_are_those_of_the_training_scripts() -> None:
    shell = (ROOT / "scripts/gpu_environment.sh").read_text()
    theirs = dict(re.findall(r'export (\w+)="\$\{\w+:-([^}]*)\}"', shell))
    ours = dict(re.findall(r"(\w+)=(\S+)", next(line for line in STEPS if "expandable_segments" in line)))
    assert ours == theirs
