"""omnibal COMMAND ...: balanced training of vision-language models, from conversations to a running job.

omnibal COMMAND --help says what a command takes, omnibal --version which version this is.
"""

import difflib
import runpy
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from omnibal_ext.flags import ToolParser
from omnibal_ext.output import say


class Command(NamedTuple):
    """A command of omnibal: the module in this folder that it runs, and what it does."""

    file: str
    does: str


COMMANDS = {
    "look": Command("look.py", "what a run loses to padding and waiting, from sizes or conversations, in a minute"),
    "preprocess": Command("preprocess_data.py", "conversations and images to a dataset folder"),
    "pack": Command("pack_data.py", "a dataset, or sizes alone, to balanced packs"),
    "level": Command("level_packs.py", "packs, for another number of data-parallel ranks"),
    "profile": Command("profile_layers.py", "what the layers of a model cost, measured here or counted"),
    "plan": Command("plan_layout.py", "where to cut a model, what to recompute, which schedule to run"),
    "launch": Command("launch.py", "all of these where they are missing, and then the training"),
    "report": Command("report.py", "a plan or runs as a page, and as a trace"),
    "prove": Command("prove_packs.py", "are packs isolated: any collator's against their samples alone"),
    "convert": Command("convert_checkpoint.py", "weights from Hugging Face's folders and back"),
}


def main() -> None:
    """Run the command that the first word names; exit code 2 if there is none of that name."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help", "--version"):
        print(f"omnibal {_version()}" if name == "--version" else _help())
    elif name not in COMMANDS:
        sys.exit(_refuse(name))
    else:
        del sys.argv[1]
        ToolParser.program = f"omnibal {name}"
        runpy.run_path(str(Path(__file__).with_name(COMMANDS[name].file)), run_name="__main__")


def _help() -> str:
    return "\n".join([__doc__, *(f"  {name:12}{command.does}" for name, command in COMMANDS.items())])


def _version() -> str:
    try:
        return version("omnibal")
    except PackageNotFoundError:
        return "of a folder that is not installed"


def _refuse(name: str) -> int:
    nearest = difflib.get_close_matches(name, COMMANDS, 1, 0.5)
    known = f"the nearest is {nearest[0]}, all are" if nearest else "choose one of"
    say(f"error: omnibal {name}: no such command; {known} {', '.join(COMMANDS)}", error=True)
    return 2


if __name__ == "__main__":
    main()
