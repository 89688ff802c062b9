"""Runs a program of examples/ as `python examples/NAME` does: what lies beside it is found first."""

import runpy
import sys

from tests.programs import ROOT

if __name__ == "__main__":
    path = ROOT / "examples" / sys.argv.pop(1)
    sys.argv[0] = str(path)
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")
