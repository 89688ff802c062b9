"""A shell offers the commands, their flags, the choices of flags, and behind -- the flags of Megatron's."""

import subprocess
import sys

import pytest

from tests.unit.test_tool_flags import parser_of
from tools import completion
from tools.__main__ import COMMANDS

ASK = """
while IFS= read -r line; do
    read -ra COMP_WORDS <<< "$line"
    [[ "$line" != *" " ]] || COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _omnibal
    echo "${COMPREPLY[*]}"
done
"""


@pytest.fixture(scope="module")
def script() -> str:
    """What `omnibal completion bash` prints."""
    with pytest.MonkeyPatch.context() as patched:
        said: list[str] = []
        patched.setattr(sys, "argv", ["omnibal completion", "bash"])
        patched.setattr("builtins.print", lambda text, **_: said.append(text))
        completion.main()
    return "".join(said)


def offered(script: str, lines: list[str]) -> list[list[str]]:
    """What bash offers where each line ends."""
    command = ["bash", "--norc", "-c", script + ASK]
    done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split() for line in done.stdout.splitlines()]


def test_a_shell_offers_what_fits(script: str) -> None:
    cases = {
        "omnibal ": [*COMMANDS, "--help", "--version"],
        "omnibal la": ["launch"],
        "omnibal --v": ["--version"],
        "omnibal pack --met": ["--method"],
        "omnibal pack --method ": ["balanced", "isf", "hbp", "random", "length_group", "device_group"],
        "omnibal pack --method is": ["isf"],
        "omnibal pack --method isf --data ": [],  # files
        "omnibal preprocess --shorten fewer-tiles tr": ["truncate"],
        "omnibal level --last-iteration ": ["next_epoch", "empty"],
        "omnibal completion ": ["bash", "zsh"],
        "omnibal launch --weight-decay-inc": [],
        "omnibal launch --loss-reduction s": ["square", "sample"],
        "omnibal launch --model x -- --weight-decay-inc": ["--weight-decay-incr-style"],
        "omnibal launch --model x -- --weight-decay-incr-style c": ["constant", "cosine"],
        "omnibal launch -- --run-d": [],
        "omnibal lanch --": [],
    }
    found = offered(script, list(cases))
    assert dict(zip(cases, map(sorted, found), strict=True)) == {line: sorted(words) for line, words in cases.items()}


def test_every_flag_of_every_command_is_offered(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = offered(script, [f"omnibal {word} --" for word in COMMANDS])
    for (word, command), flags in zip(COMMANDS.items(), found, strict=True):
        parser = parser_of(command.file.removesuffix(".py"), monkeypatch)
        assert sorted(flags) == sorted(flag for flag in parser._option_string_actions if flag.startswith("--")), word
