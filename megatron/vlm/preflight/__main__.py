"""Check a run before it starts and print the findings as one JSON object; exit code 2 if it is refused.

python -m megatron.vlm.preflight '{"endpoint": null, "memory_gib": 72}' <arguments of megatron.vlm.pretrain>

WORLD_SIZE and LOCAL_WORLD_SIZE in the environment: how many ranks there will be. `omnibal launch` calls it.
"""

import contextlib
import dataclasses
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.vlm import platform
from megatron.vlm.arguments import read_arguments
from megatron.vlm.hf.checkpoint import OurCheckpoint
from megatron.vlm.preflight.findings import Check, Finding, run_checks
from megatron.vlm.preflight.machine import check_host_memory, check_memory, check_rendezvous
from megatron.vlm.preflight.run import Run, check_run
from megatron.vlm.preflight.saving import check_run_folder, checkpoint_bytes
from megatron.vlm.weights import Weights
from omnibal_ext.errors import UserError
from omnibal_ext.units import GIB


def main() -> None:
    """Check the run that sys.argv describes and print the report; exit with 2 if it is refused, else 0."""
    job = json.loads(sys.argv.pop(1))
    report = preflight(job)
    print(json.dumps(report))
    sys.exit(2 if any(finding["state"] == "refused" for finding in report["findings"]) else 0)


def preflight(job: dict[str, Any]) -> dict[str, Any]:
    """Return the report on a run with sys.argv's flags; `job`: other fields of `Run`. Megatron's output is dropped."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            run = Run(read_arguments(is_packed=job.get("is_packed", True)), converts=True, **job)
        except UserError as error:
            return _report([Finding("flags", "refused", line) for line in error.lines], None)
        findings = [*check_run(run), *run_checks(CHECKS, run)]
    try:
        return _report(findings, run.weights, _has_ended(run))
    except UserError:
        return _report(findings, None)


def _has_ended(run: Run) -> bool:
    """Return whether nothing is left to train: the save of the last iteration exists and is undamaged."""
    weights = run.weights
    if not weights.ends(run.inputs.args.train_iters) or weights.folder is None:
        return False
    try:
        OurCheckpoint(weights.folder, step=weights.iteration).verify()
    except UserError:
        return False
    return True


def _report(findings: Sequence[Finding], weights: Weights | None, ended: bool = False) -> dict[str, Any]:
    folder = weights and weights.folder and str(weights.folder)
    described = {"kind": weights.kind, "folder": folder, "ended": ended} if weights else None
    rows = [dataclasses.asdict(finding) for finding in findings]
    return {"findings": rows, "weights": described, "device_gib": platform.device_memory() / GIB}


def _check_memory(run: Run) -> str:
    return check_memory(run.inputs.args, run.inputs.architecture, run.inputs.plan, run.memory_gib)


def _check_host_memory(run: Run) -> str:
    args, architecture = run.inputs.args, run.inputs.architecture
    return check_host_memory(args, architecture, checkpoint_bytes(args, architecture))


CHECKS: tuple[tuple[str, Check[Run]], ...] = (
    ("run folder", lambda run: run.run_dir and check_run_folder(run.inputs.args, Path(run.run_dir))),
    ("memory", _check_memory),
    ("host memory", _check_host_memory),
    ("rendezvous", lambda run: run.endpoint and check_rendezvous(run.endpoint)),
)

if __name__ == "__main__":
    main()
