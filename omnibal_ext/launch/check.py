"""What is checked before anything else happens: one process that loads Megatron looks at everything, in seconds."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omnibal_ext.console import print_table
from omnibal_ext.errors import UserError
from omnibal_ext.launch.processes import run_to_end
from omnibal_ext.launch.versions import check_versions


@dataclass(frozen=True)
class Report:
    """What was found. A finding is {"check", "state": ok | note | later | refused, "detail"}."""

    findings: list[dict[str, str]]
    weights: dict[str, str | None] | None
    """What the run starts from: kind (own, given, unconverted, random) and folder; None where that is refused."""
    device_gib: float

    @property
    def refusals(self) -> list[str]:
        """Why the run may not start, a line each."""
        return [finding["detail"] for finding in self.findings if finding["state"] == "refused"]

    @property
    def resumes(self) -> bool:
        """Whether the run goes on from a checkpoint of its own."""
        return self.weights is not None and self.weights["kind"] == "own"

    def print(self) -> None:
        """The table of checks."""
        rows = [(finding["check"], finding["state"], finding["detail"]) for finding in self.findings]
        print_table("check", ("what", "", "found"), rows, right=False)


def check(words: Sequence[str], nodes: int, ranks_a_node: int, job: dict[str, Any]) -> Report:
    """Check a run with these arguments of `megatron.vlm.pretrain`; for `job` see `megatron.vlm.preflight`.

    Raises UserError for versions that the checks themselves do not run on.
    """
    versions = {"check": "versions", "state": "ok", "detail": check_versions()}
    sizes = {"WORLD_SIZE": nodes * ranks_a_node, "LOCAL_WORLD_SIZE": ranks_a_node, "RANK": 0, "LOCAL_RANK": 0}
    environment = {**os.environ, **{name: str(value) for name, value in sizes.items()}}
    command = [sys.executable, "-W", "ignore", "-m", "megatron.vlm.preflight", json.dumps(job), *words]
    done = run_to_end(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if done.returncode not in (0, 2) or not done.stdout:
        sys.stderr.write(done.stderr)
        raise UserError("the checks could not be made, see above; the flags of Megatron's may contradict each other")
    report = json.loads(done.stdout.splitlines()[-1])
    return Report([versions, *report["findings"]], report["weights"], report["device_gib"])
