"""Check a run before it starts and print the findings as one JSON object; exit code 2 if it is refused.

python -m megatron.vlm.preflight '{"endpoint": null, "memory_gib": 72}' <arguments of megatron.vlm.pretrain>

WORLD_SIZE and LOCAL_WORLD_SIZE in the environment: how many ranks there will be. `tools/launch.py` calls it.
"""

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.vlm import platform
from megatron.vlm.arguments import read_arguments
from megatron.vlm.preflight.findings import Finding, run_checks
from megatron.vlm.preflight.machine import check_rendezvous
from megatron.vlm.preflight.memory import check_host_memory, check_memory
from megatron.vlm.preflight.run import Run, check_run
from megatron.vlm.preflight.saving import check_run_folder, checkpoint_bytes
from megatron.vlm.weights import Weights
from omnibal_ext.errors import UserError
from omnibal_ext.units import GIB


@dataclass
class LaunchedRun:
    """A run, and facts that only its launcher knows."""

    run: Run
    endpoint: str | None = None
    """HOST:PORT at which several nodes meet."""
    memory_gib: float | None = None
    run_dir: str | None = None
    """The run's folder; the launcher moves away what an earlier run left in it."""


def main() -> None:
    """Check, print, exit with 0 or 2."""
    job = json.loads(sys.argv.pop(1))
    report = preflight(job)
    print(json.dumps(report))
    sys.exit(2 if any(finding["state"] == "refused" for finding in report["findings"]) else 0)


def preflight(job: dict[str, Any]) -> dict[str, Any]:
    """The report for the arguments in sys.argv: findings, initial weights, GPU memory; Megatron's output is dropped."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            known = {name: job.pop(name, True) for name in ("is_planned", "is_packed")}
            start = LaunchedRun(Run(read_arguments(is_packed=known["is_packed"]), converts=True, **known), **job)
        except UserError as error:
            return _report([Finding("flags", "refused", line) for line in error.lines], None)
        findings = [*check_run(start.run), *run_checks(CHECKS, start)]
    try:
        return _report(findings, start.run.weights)
    except UserError:
        return _report(findings, None)


def _report(findings: Sequence[Finding], weights: Weights | None) -> dict[str, Any]:
    described = {"kind": weights.kind, "folder": weights.folder and str(weights.folder)} if weights else None
    rows = [dataclasses.asdict(finding) for finding in findings]
    return {"findings": rows, "weights": described, "device_gib": platform.device_memory() / GIB}


def _check_memory(start: LaunchedRun) -> str:
    inputs = start.run.inputs
    return check_memory(inputs.args, inputs.architecture, inputs.plan, start.memory_gib)


def _check_host_memory(start: LaunchedRun) -> str:
    args, architecture = start.run.inputs.args, start.run.inputs.architecture
    return check_host_memory(args, architecture, checkpoint_bytes(args, architecture))


def _check_rendezvous(start: LaunchedRun) -> str | None:
    return check_rendezvous(start.endpoint) if start.endpoint else None


def _check_run_folder(start: LaunchedRun) -> str | None:
    return check_run_folder(start.run.inputs.args, Path(start.run_dir)) if start.run_dir else None


CHECKS = (
    ("run folder", _check_run_folder),
    ("memory", _check_memory),
    ("host memory", _check_host_memory),
    ("rendezvous", _check_rendezvous),
)

if __name__ == "__main__":
    main()
