"""Faults on file: a patch each, under a header that says which tests are to see it.

A pack's padding is left out of its filler.            what is wrong
Nearest: tests/unit/packing/test_metrics.py            pytest arguments
Seen by: tests/unit/packing/test_metrics.py::test_...  the one of them that failed last, tried first; a run writes it
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
NEAREST, SEEN_BY = "Nearest: ", "Seen by: "


@dataclass(frozen=True)
class Fault:
    """One patch, and the tests nearest to it."""

    path: Path
    patch: str
    """What the path held when the run began: the repository may change meanwhile."""
    file: str
    """What it changes, relative to the repository."""
    tests: tuple[str, ...]
    """Pytest arguments: paths, those that start no ranks first, then options that choose among their tests."""
    seen_by: str = ""
    """The test that saw it when it was planted last."""

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
        seen_by = [line.removeprefix(SEEN_BY) for line in lines if line.startswith(SEEN_BY)]
        files = [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")]
        if len(tests) != 1 or len(files) != 1:
            raise UserError(f"{path}: needs one line '{NEAREST}TESTS' and one file to change")
        paths = list(takewhile(lambda argument: not argument.startswith("-"), tests[0]))
        options = tests[0][len(paths) :]
        paths.sort(key=lambda path: not path.startswith("tests/unit"))
        return cls(path, patch, files[0], (*paths, *options), *seen_by)

    def plant(self, root: Path) -> None:
        """Change the file below `root`; UserError if the patch fits it no more. Lines around it may have changed."""
        command = ["git", "apply", "--recount", "-C1"]
        done = subprocess.run(command, cwd=root, input=self.patch, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"{self.path}: fits {self.file} no more: {done.stderr.strip()}; write it anew")

    def note(self, test: str) -> None:
        """Write down which test saw it, for the next run to try first."""
        others = [line for line in self.patch.splitlines(True) if not line.startswith(SEEN_BY)]
        place = 1 + next(number for number, line in enumerate(others) if line.startswith(NEAREST))
        self.path.write_text("".join([*others[:place], f"{SEEN_BY}{test}\n", *others[place:]]), encoding="utf-8")


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
