"""Demo data: `examples/demo/data.py`, by the name that scripts call."""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omnibal_ext.errors import UserError, run_tool

PROGRAM = Path(__file__).resolve().parents[1] / "examples" / "demo" / "data.py"


def main() -> None:
    """Run the example. Raises UserError where there is none, as in an installed package."""
    if not PROGRAM.exists():
        raise UserError(f"{PROGRAM}: is not there; take a copy of the repository, whose examples are not installed")
    runpy.run_path(str(PROGRAM))["main"]()


if __name__ == "__main__":
    run_tool(main)
