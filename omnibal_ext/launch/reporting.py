"""Writes the report of a run, and inputs.json, which the report needs."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omnibal_ext.files.folders import noted_path
from omnibal_ext.files.records import write_record
from omnibal_ext.flags import flag_value
from omnibal_ext.launch.check import check_versions
from omnibal_ext.launch.planning import Planning
from omnibal_ext.launch.processes import run_python
from omnibal_ext.output import say
from omnibal_ext.reading.document import sealed
from omnibal_ext.run_metrics import INPUTS, VERSIONS

REPORT = "report.html"
WRITTEN = {"metrics": "--metrics-file", "tensorboard": "--tensorboard-dir"}


def note_inputs(planning: Planning, words: Sequence[str], recipe: Mapping[str, Any]) -> None:
    """Write inputs.json: paths of the run's plan, profile, packs and metrics, versions of packages, and its recipe."""
    paths = {"plan": planning.plan_path, "profile": profile_of(planning), "packs": planning.index.folder}
    paths |= {name: Path(path) for name, flag in WRITTEN.items() if (path := flag_value(flag, words))}
    record: dict[str, Any] = {name: noted_path(planning.run_dir, path) for name, path in paths.items()}
    write_record(planning.run_dir / INPUTS, sealed({**record, VERSIONS: check_versions(), **recipe}))


def profile_of(planning: Planning) -> Path:
    """The plan's profile: with --plan and without --profile, the profile.json in the plan's folder."""
    given = planning.flags.plan and not planning.flags.profile
    return planning.plan_path.with_name("profile.json") if given else planning.profile_path


def write_report(tool: Path, planning: Planning, quiet: bool) -> None:
    """Write RUN/report.html and, unless `quiet`, print its path. A hand-written plan has no profile, and no report."""
    run_dir, profile = planning.run_dir, profile_of(planning)
    said = f"no report: {profile} is not there, and the plan's predictions are made from it"
    if profile.exists():
        page = run_dir / REPORT
        done = run_python(tool, "--run", run_dir, "--output", page, stdout=subprocess.DEVNULL)
        said = f"report: {page}" if done.returncode == 0 else ""
    if said and not quiet:
        say(said)
