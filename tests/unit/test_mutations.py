"""The faults on file fit the code as it is: one that fits no more is seen by no test, and nobody would know."""

import subprocess

from tests.programs import ROOT


def test_every_fault_on_file_fits_the_code() -> None:
    patches = sorted((ROOT / "tests/mutations").glob("*.patch"))
    assert len(patches) >= 80
    check = ["git", "apply", "--check", "--recount", "-C1"]
    runs = [subprocess.run([*check, str(patch)], cwd=ROOT, capture_output=True, check=False) for patch in patches]
    stale = [patch.stem for patch, run in zip(patches, runs, strict=True) if run.returncode]
    assert not stale, "file them anew (CONTRIBUTING.md)"
