"""Runs `examples/demo/data.py`, which makes demo data."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omnibal_ext.errors import UserError, run_tool

PROGRAM = Path(__file__).resolve().parents[1] / "examples" / "demo" / "data.py"


def main() -> None:
    """Run examples/demo/data.py, which makes demo data. Raises UserError if installed without the examples."""
    if not PROGRAM.exists():
        raise UserError(f"{PROGRAM}: is not there; take a copy of the repository, whose examples are not installed")
    runpy.run_path(str(PROGRAM))["main"]()


if __name__ == "__main__":
    run_tool(main)
