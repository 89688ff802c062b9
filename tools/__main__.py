"""omnibal COMMAND ...: runs one of the programs beside this file, with its own flags.

omnibal preprocess | pack | level | profile | plan | launch | report | convert
"""

import runpy
import sys
from pathlib import Path

from omnibal_ext.output import say

COMMANDS = {
    "preprocess": "preprocess_data.py",
    "pack": "pack_data.py",
    "level": "level_packs.py",
    "profile": "profile_layers.py",
    "plan": "plan_layout.py",
    "launch": "launch.py",
    "report": "report.py",
    "convert": "convert_checkpoint.py",
}


def main() -> None:
    """Run the program that the first word names; exit code 2 for another word."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(__doc__)
        return
    if name not in COMMANDS:
        sys.exit(_refuse(name))
    sys.argv = [f"omnibal {name}", *sys.argv[2:]]
    runpy.run_path(str(Path(__file__).with_name(COMMANDS[name])), run_name="__main__")


def _refuse(name: str) -> int:
    say(f"error: omnibal {name}: no such command; choose one of {', '.join(COMMANDS)}", error=True)
    return 2


if __name__ == "__main__":
    main()
