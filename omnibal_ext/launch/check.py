"""Checks of a run before anything else is started: versions, and all else in a process that imports Megatron
(`megatron.vlm.preflight`)."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet

from omnibal_ext.console import print_table
from omnibal_ext.errors import UserError, missing_package
from omnibal_ext.launch.processes import run_python

SUPPORTED = {"torch": ">=2.8,<3", "megatron-core": ">=0.19.2,<0.20"}
PYTHON = ">=3.11,<3.14"


def check_versions() -> str:
    """Return a line with all versions. Raises UserError for a missing package or unsupported version."""
    if platform.python_version() not in SpecifierSet(PYTHON):
        raise UserError(f"Python {platform.python_version()}; {PYTHON} is needed: see scripts/setup.sh")
    found = {"python": platform.python_version()}
    for package, wanted in SUPPORTED.items():
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            needed = missing_package(package.replace("-", ".")) or f"{package} {wanted}"
            raise UserError(f"training needs {needed}, or run scripts/setup.sh there and enter .venv") from None
        if not SpecifierSet(wanted).contains(found[package], prereleases=True):
            raise UserError(f"{package} is {found[package]}; {wanted} is needed: run scripts/setup.sh and enter .venv")
    return ", ".join(f"{name} {number}" for name, number in found.items())


@dataclass(frozen=True)
class Report:
    """Findings of the checks, each {"check", "state": ok | note | later | refused, "detail"}."""

    findings: list[dict[str, str]]
    weights: dict[str, Any] | None
    """Initial weights: kind (own: the run's checkpoint, given, unconverted, random), folder, and whether the run has
    `ended` with them; None: refused."""
    device_gib: float
    """Memory of one device."""

    @property
    def refusals(self) -> list[str]:
        """Reasons why the run may not start, a line each."""
        return [finding["detail"] for finding in self.findings if finding["state"] == "refused"]

    @property
    def resumes(self) -> bool:
        """Whether the run resumes from its own checkpoint."""
        return self.weights is not None and self.weights["kind"] == "own"

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to train."""
        return self.weights is not None and self.weights["ended"]

    def print(self) -> None:
        """Print the findings as a table."""
        rows = [(finding["check"], finding["state"], finding["detail"]) for finding in self.findings]
        print_table("check", ("what", "", "found"), rows)


def check(words: Sequence[str], nodes: int, ranks_a_node: int, job: dict[str, Any]) -> Report:
    """Check a run with these arguments of `megatron.vlm.pretrain`; for `job` see `megatron.vlm.preflight`.

    Raises UserError for unsupported versions of Python, torch or Megatron Core.
    """
    versions = {"check": "versions", "state": "ok", "detail": check_versions()}
    sizes = {"WORLD_SIZE": nodes * ranks_a_node, "LOCAL_WORLD_SIZE": ranks_a_node, "RANK": 0, "LOCAL_RANK": 0}
    environment = {**os.environ, **{name: str(value) for name, value in sizes.items()}}
    streams: dict[str, Any] = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    done = run_python("-m", "megatron.vlm.preflight", json.dumps(job), *words, **streams)
    if done.returncode not in (0, 2) or not done.stdout:
        sys.stderr.write(done.stderr)
        raise UserError("the checks could not be made, see above; the flags of Megatron's may contradict each other")
    report = json.loads(done.stdout.splitlines()[-1])
    return Report([versions, *report["findings"]], report["weights"], report["device_gib"])
