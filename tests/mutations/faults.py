"""Faults on file: a patch each, under a header that says which tests are to see it.

A pack's padding is left out of its filler.            what is wrong
Nearest: tests/unit/packing/test_metrics.py            pytest arguments
--- a/omnibal_ext/packing/ordering/metrics.py
+++ b/omnibal_ext/packing/ordering/metrics.py
"""

import difflib
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from omnibal_ext.errors import UserError

FOLDER = Path(__file__).parent
NEAREST = "Nearest: "


@dataclass(frozen=True)
class Fault:
    """One patch, and the tests nearest to it."""

    path: Path
    patch: str
    """What the path held when the run began: the repository may change meanwhile."""
    file: str
    """What it changes, relative to the repository."""
    tests: tuple[str, ...]
    """Pytest arguments: paths, then options that choose among their tests."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Where the nearest tests are."""
        return tuple(takewhile(lambda argument: not argument.startswith("-"), self.tests))

    @property
    def name(self) -> str:
        """Its name on the command line."""
        return self.path.stem

    @classmethod
    def read(cls, path: Path) -> "Fault":
        """Read a patch; UserError if it names no tests or no file."""
        patch = path.read_text(encoding="utf-8")
        lines = patch.splitlines()
        tests = [shlex.split(line.removeprefix(NEAREST)) for line in lines if line.startswith(NEAREST)]
        files = [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")]
        if len(tests) != 1 or len(files) != 1:
            raise UserError(f"{path}: needs one line '{NEAREST}TESTS' and one file to change")
        return cls(path, patch, files[0], tuple(tests[0]))

    def plant(self, root: Path) -> None:
        """Change the file below `root`; UserError if the patch fits it no more. Lines around it may have changed."""
        command = ["git", "apply", "--recount", "-C1"]
        done = subprocess.run(command, cwd=root, input=self.patch, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"{self.path}: fits {self.file} no more: {done.stderr.strip()}; write it anew")


def all_faults() -> list[Fault]:
    """Every fault on file, by name."""
    return [Fault.read(path) for path in sorted(FOLDER.glob("*.patch"))]


def write_fault(root: Path, record: Mapping[str, str]) -> Path:
    """File a fault: `name`, `file`, `old` and `new` text, `test` (pytest arguments), `fault` (what is wrong).

    Raises UserError unless the old text stands in the file once.
    """
    path = root / record["file"]
    before = path.read_text(encoding="utf-8")
    if before.count(record["old"]) != 1:
        raise UserError(f"fault {record['name']}: its old text stands {before.count(record['old'])} times in {path}")
    after = before.replace(record["old"], record["new"])
    names = (f"a/{record['file']}", f"b/{record['file']}")
    diff = "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), *names))
    target = FOLDER / f"{record['name']}.patch"
    said = record.get("fault") or record["name"].replace("-", " ")
    target.write_text(f"{said}\n{NEAREST}{record['test']}\n{diff}", encoding="utf-8")
    return target
