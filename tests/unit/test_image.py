"""The Dockerfile: versions that fit each other and what we ask for, files that are there, settings of the scripts."""

import re
from importlib.metadata import requires

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


def test_what_it_copies_is_there() -> None:
    copied = [word for line in STEPS if line.startswith("COPY") for word in line.split()[1:-1]]
    assert {"setup.py", "megatron", "omnibal_ext", "tools", "scripts"} <= set(copied)
    assert all((ROOT / name).exists() for name in copied)


def test_its_settings_are_those_of_the_training_scripts() -> None:
    shell = (ROOT / "scripts/gpu_environment.sh").read_text()
    theirs = dict(re.findall(r'export (\w+)="\$\{\w+:-([^}]*)\}"', shell))
    ours = dict(re.findall(r"(\w+)=(\S+)", next(line for line in STEPS if "expandable_segments" in line)))
    assert ours == theirs
