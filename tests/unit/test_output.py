"""What programs say: a line stays a line, and nobody who does not listen ends a program."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnibal_ext.console import print_table
from omnibal_ext.errors import UserError
from omnibal_ext.output import printable, say
from tests.unit.test_architecture import ROOT, modules, parsed

FORGED = "a\x1b[31m\nerror: forged\r\u2028\x85b\udcff"
SPEAKER = """
import os, sys
from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.output import say
def main():
    if sys.argv[1] == "child":
        sys.exit(os.system("echo child; echo child >&2"))
    for number in range(3000):
        say(f"line {number}")
        say(f"line {number}", error=True)
    print_table("table", ("a", "b"), [("c", 1)])
    open(sys.argv[2], "w").write("to the end")
    if sys.argv[1] == "opens":
        os.write(1, b"not in the file")
    if sys.argv[1] == "refuses":
        raise UserError("no")
    if sys.argv[1] == "exits":
        sys.exit(0)
run_tool(main)
"""


def speak(tmp_path: Path, what: str, redirected: str) -> tuple[int, str]:
    """A program's exit code and what could be read of it, its output redirected as in a shell."""
    code, end = tmp_path / "code", tmp_path / "end"
    python = f"'{sys.executable}' -c '{SPEAKER}' {what} {end}"
    script = f"{{ {python}; echo $? >{code}; }} {redirected}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], env=environment, text=True, capture_output=True, check=False)
    if what != "child":
        assert end.read_text() == "to the end"
    return int(code.read_text()), done.stdout + done.stderr


@pytest.mark.parametrize("redirected", [">&-", "<&- >&- 2>&-", "| true", "2>&1 | true", "2>/dev/full", "2>&1 >&-"])
def test_a_program_that_nobody_reads_goes_on_to_its_end(tmp_path: Path, redirected: str) -> None:
    code, said = speak(tmp_path, "ends", redirected)
    assert (code, "Traceback" in said, "Exception" in said) == (0, False, False)


def test_what_is_asked_for_and_cannot_be_written_is_said(tmp_path: Path) -> None:
    """But not of a program that has ended otherwise: a run has trained, whoever reads of it."""
    code, said = speak(tmp_path, "ends", ">/dev/full")
    wanted = "error: stdout: No space left on device: not all of it is written; give it to another file"
    assert (code, said.splitlines()[-1]) == (2, wanted)
    assert speak(tmp_path, "exits", ">/dev/full")[0] == 0


def test_a_refusal_has_its_exit_code_whoever_reads_it(tmp_path: Path) -> None:
    for redirected in (">/dev/full 2>/dev/full", ">&- 2>&-", "2>&1 | true"):
        assert speak(tmp_path, "refuses", redirected)[0] == 2


def test_a_closed_number_is_given_to_no_file(tmp_path: Path) -> None:
    """Or what a child, or a library, prints would stand in it."""
    assert (speak(tmp_path, "opens", ">&-")[0], speak(tmp_path, "child", ">&- 2>&-")[0]) == (0, 0)


def test_text_of_others_is_one_line_that_steers_no_terminal() -> None:
    assert printable(FORGED) == r"a\x1b[31m\nerror: forged\r\u2028\x85b\udcff"
    assert printable("图像 é ø.png") == "图像 é ø.png"
    assert str(UserError(FORGED)) == printable(FORGED)


def test_tables_and_lines_hold_it_so(capsys: pytest.CaptureFixture[str]) -> None:
    """And markup of others is text: rich would colour it, or fail."""
    say(FORGED)
    say(FORGED, FORGED, error=True)
    print_table(FORGED, (FORGED, "[/b]"), [(FORGED, "[red]:smile:[/]")])
    output, errors = capsys.readouterr()
    assert not any(character in output + errors for character in "\x1b\r\u2028\x85\udcff")
    assert not [line for line in (output + errors).splitlines() if line.startswith("error")]
    assert errors.splitlines() == [printable(FORGED)] * 2
    assert "[red]:smile:[/]" in output
    assert "[/b]" in output


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            yield getattr(node.func, "attr", getattr(node.func, "id", "")), node


def test_nothing_is_printed_past_it() -> None:
    """Machines' JSON and texts of our own, and what ranks and their parent hand through, aside."""
    texts = ("megatron.vlm.preflight.__main__", "tools.__main__")
    found = []
    for module, path in modules().items():
        prints = [node for name, node in calls(path) if name == "print" and not isinstance(node.func, ast.Attribute)]
        if module != "omnibal_ext.output":
            found += [f"{module}:{node.lineno}: say it" for node in prints[module in texts :]]
        told = [node for name, node in calls(path) if name.startswith("print_rank")]
        found += [f"{module}:{one.lineno}: make it printable" for one in told
                  if getattr(getattr(one.args[0], "func", None), "id", "") != "printable"]  # fmt: skip
    assert not found
