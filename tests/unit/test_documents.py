"""What documents name is there: linked files, programs, their flags, lines that are printed."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnibal_ext.architectures.presets import PRESETS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PROGRAMS = sorted(path for room in ("tools", "benchmarks", "examples") for path in (ROOT / room).glob("*.py"))
COMMANDS = {"preprocess": "preprocess_data", "pack": "pack_data", "profile": "profile_layers", "plan": "plan_layout",
            "convert": "convert_checkpoint", "launch": "launch", "report": "report", "look": "look",
            "level": "level_packs"}  # fmt: skip

PROGRAM = re.compile(r"(tools|benchmarks|examples|scripts)/[\w./]+\.(py|sh|sbatch)")


GENERATED = {"api.md": "python -m tests.reference", "flags.md": "python -m tests.flag_page"}
"""Pages of all that there is of a kind, by what makes them."""
LONGEST = 20_000
"""Bytes of a page that someone wrote: what a user needs and what is looked up are pages of their own."""


def commands(text: str) -> Iterator[list[str]]:
    """The command lines of a document's bash blocks, continued lines joined, comments left out."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|", line):
                if words := shlex.split(part, comments=True):
                    yield words


def of_docstring(path: Path) -> Iterator[list[str]]:
    """The command lines by which a program is started, as its docstring says; what may be left out is there too."""
    text = (ast.get_docstring(ast.parse(path.read_text())) or "").replace("\\\n", " ")
    for line in text.splitlines():
        if re.match(r"\s*(python|bash) ", line):
            yield shlex.split(re.sub(r"[\[\]]|\.\.\.", " ", line.partition("#")[0]))


def named(text: str) -> Iterator[str]:
    yield from re.findall(r"`(?:python |bash |source )*([\w./-]+/[\w.-]+\.(?:py|sh|sbatch|md))[^`]*`", text)


def sources(program: str) -> str:
    """A program, and our modules that it imports, beside it too: one of them may add flags."""
    text = (ROOT / program).read_text()
    imported = re.findall(r"^from ([\w.]*) import", text, re.MULTILINE)
    folders = (ROOT, (ROOT / program).parent)
    paths = (folder / (name.replace(".", "/") + ".py") for name in imported for folder in folders)
    return text + "".join(path.read_text() for path in paths if path.exists())


def titles(path: Path) -> set[str]:
    """What links to a document's titles are called: lower case, without punctuation, spaces as hyphens."""
    found = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for name, title in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", path.read_text()):
        if "://" not in name:
            target = path.parent / name if name else path
            assert target.exists(), f"{path.name}: {name}"
            assert not title or title in titles(target), f"{path.name}: {name}#{title}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_pages_are_short_and_lead_on(path: Path) -> None:
    """The site's navigation is README's list, and the pages of families and trainers."""
    if "docs" in path.parts and path.name not in GENERATED:
        assert path.stat().st_size <= LONGEST, f"{path.name}: split it"
    if path.parent == ROOT / "docs" and path.name != "verdicts.md":
        assert f"](docs/{path.name})" in (ROOT / "README.md").read_text().partition("\n## Documentation\n")[2]


@pytest.mark.parametrize("path", [*DOCUMENTS, *PROGRAMS], ids=lambda path: path.name)
def test_commands_and_their_flags_exist(path: Path) -> None:
    for words in commands(path.read_text()) if path in DOCUMENTS else of_docstring(path):
        for program in filter(PROGRAM.fullmatch, words):
            assert (ROOT / program).exists(), f"{path.name}: {program}"
            if not program.endswith(".py"):
                continue
            source = sources(program)
            ours = words[words.index(program) :]  # what is before it is its launcher's
            ours = ours[: ours.index("--")] if "--" in ours else ours
            for flag in (word.partition("=")[0] for word in ours if word.startswith("--")):
                assert f'"{flag}"' in source or flag in ("--help", "--json"), f"{path.name}: {program} {flag}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_named_in_passing_exist(path: Path) -> None:
    rooms = ("", "megatron/vlm", "omnibal_ext", "omnibal_ext/packing", "tests")
    for name in named(path.read_text()):
        assert any((ROOT / room / name).exists() for room in rooms), f"{path.name}: {name}"


def test_the_command_knows_every_tool_it_is_documented_with() -> None:
    source = (ROOT / "tools/__main__.py").read_text()
    for command, tool in COMMANDS.items():
        assert f'"{command}": Command("{tool}.py", ' in source
        assert (ROOT / f"tools/{tool}.py").exists()


def test_every_preset_is_on_the_page_of_one_family() -> None:
    pages = {path.name: path.read_text() for path in (ROOT / "docs/models").glob("*.md")}
    rows = [row for text in pages.values() for row in re.findall(r"^\|.*", text, re.MULTILINE)]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row) if name in PRESETS]
    assert sorted(named) == sorted({*PRESETS} - {"tiny"})
    index = (ROOT / "docs/models.md").read_text()
    assert [name for name in pages if f"](models/{name}" not in index] == []


def test_documents_name_the_signal_that_the_batch_script_asks_for() -> None:
    (asked,) = re.findall(r"^#SBATCH --signal=(\S+)$", (ROOT / "scripts/slurm/train.sbatch").read_text(), re.MULTILINE)
    found = {path.name: set(re.findall(r"--signal=(\S+@\d+)", path.read_text())) for path in DOCUMENTS}
    assert {name: signals for name, signals in found.items() if signals} == {"cluster.md": {asked}, "gpu.md": {asked}}


def printed() -> Iterator[str]:
    """Every text in our code, with NUL where it is filled in."""
    for room in ("omnibal_ext", "megatron/vlm", "tools"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)  # type: ignore[misc]
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_lines_of_the_troubleshooting_page_are_printed_by_the_code() -> None:
    texts = "\n".join(text.replace("\n", " ") for text in printed())
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    lines = [line for row in rows for line in re.findall(r"`([^`]+)`", row) if " " in line]
    assert len(lines) > 20
    unknown = [line for line in lines if not re.search(pattern(line), texts)]
    assert unknown == []


def pattern(line: str) -> str:
    """A text of the code in which these words follow each other; what is between them is filled in, or other words."""
    return "[^\\n]*".join(map(re.escape, line.split("...")))


def test_commands_have_one_form() -> None:
    """A wheel has no tools/, and a clone that is not installed fails with a traceback there."""
    texts = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts += [path for room in ("omnibal_ext", "megatron/vlm", "tools") for path in (ROOT / room).rglob("*.py")]
    programs = "|".join(f"{tool}\\.py" for tool in COMMANDS.values())
    other = re.compile(rf"(?<![\w/(.])(?:python )?tools/(?:{programs})")
    found = {str(path.relative_to(ROOT)) for path in texts if other.search(path.read_text())}
    assert found <= {"docs/architecture.md", "docs/api.md"}
