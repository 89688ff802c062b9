"""A script that completes the commands and flags of omnibal.

    omnibal completion bash > ~/.local/share/bash-completion/completions/omnibal
    omnibal completion zsh > ~/.omnibal.zsh; echo 'source ~/.omnibal.zsh' >> ~/.zshrc

Made anew where omnibal is: flags may change with the version.
"""

import argparse
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from omnibal_ext.completion import SHELLS, script
from omnibal_ext.errors import faults_in_a_line, run_tool
from omnibal_ext.flags import ToolParser

with faults_in_a_line():
    from megatron.vlm.arguments import add_vlm_arguments
    from megatron.vlm.flags.parser import Parser


def main() -> None:
    """Ask every program for its parser, and print the script."""
    shell = _parser().parse_args().shell
    here = Path(__file__).parent
    commands = runpy.run_path(str(here / "__main__.py"))["COMMANDS"]
    parsers = {word: runpy.run_path(str(here / command.file))["_parser"]() for word, command in commands.items()}
    behind = {word: Parser(add_vlm_arguments, []) for word, parser in parsers.items() if parser.behind}
    print(script(shell, "omnibal", parsers, behind), end="")


def _parser() -> ToolParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shell", choices=SHELLS, help="whose script")
    return parser


if __name__ == "__main__":
    run_tool(main)
