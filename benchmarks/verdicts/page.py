"""docs/verdicts.md from benchmarks/results/verdicts.json: `python -m benchmarks.verdicts.page > docs/verdicts.md`.

`rows` of the file are what `run.py` saw, `apart` by trainer what was left out, `read` what was read in sources;
`page.md` beside this has what stands around.
"""

import json
import re
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.verdicts.folders import KINDS

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks/results/verdicts.json", ROOT / "docs/verdicts.md"
FRAME = Path(__file__).with_name("page.md")
KERNELS = ("eager", "sdpa", "flash")
SAMPLES = ("images", "words")
ORDER = ("trl", "ms-swift", "llamafactory", "axolotl", "nemo-automodel")


def page(found: dict[str, Any]) -> str:
    """Return the whole page."""
    tables = [table_of([row for row in found["rows"] if row["trainer"] == one], found["apart"][one]) for one in ORDER]
    marks = {
        "SUMMARY": summary(found["rows"]),
        "TABLES": "\n\n".join(tables),
        "READ": read_table(found["read"]),
    }
    text = FRAME.read_text()
    for mark, value in marks.items():
        text = text.replace(f"{{{mark}}}", value)
    return text


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of the newest versions: of each way what is said of packs with images, and of words."""
    lines = ["| trainer, way | packs with images | words only |", "|---|---|---|"]
    for trainer in ORDER:
        newest = max((row["version"] for row in rows if row["trainer"] == trainer), key=_number)
        own = [row for row in rows if (row["trainer"], row["version"]) == (trainer, newest)]
        for way in dict.fromkeys(row["says"] for row in own):
            cells = (in_short([row for row in own if (row["says"], row["samples"]) == (way, what)]) for what in SAMPLES)
            lines.append(f"| {' | '.join((f'{trainer} {newest}, {way}', *cells))} |")
    return "\n".join(lines)


def in_short(rows: Sequence[dict[str, Any]]) -> str:
    """Return each verdict with its folders and kernels, those that have the same folders together; `rows`: one way's,
    of one kind of samples."""
    folders: dict[tuple[str, str], list[str]] = {}
    for kernel in KERNELS:
        for row in rows:
            if kernel in row["kernels"]:
                folders.setdefault((word(row, kernel), kernel), []).append(row["folder"])
    kernels: dict[tuple[str, str], list[str]] = {}
    for (said, kernel), names in folders.items():
        kernels.setdefault((said, named(names)), []).append(kernel)
    under = {what: "" if tuple(own) == KERNELS else f" ({', '.join(own)})" for what, own in kernels.items()}
    return "<br>".join(f"{said}: {names}{own}" for (said, names), own in under.items()) or "-"


def word(row: dict[str, Any], kernel: str) -> str:
    """Return a verdict without reasons; of a leak with what the trainer says against the setting."""
    said = re.sub("^runs.*", "fails", row["kernels"][kernel].partition(":")[0])
    against = row["against"].get(kernel) if said.startswith("leaks") else None
    return f"{said}, {against}" if against else said


def named(folders: Sequence[str]) -> str:
    """Return names of folders, or that it is all of them."""
    return "all" if set(folders) == set(KINDS) else ", ".join(folders)


def table_of(rows: Sequence[dict[str, Any]], apart: Sequence[str]) -> str:
    """Return a trainer's title, commands and table: a line for each version, way and samples, folders of one verdict
    together; why what could not be run was not, and what of the trainer stood `apart`."""
    lines = [f"### {rows[0]['trainer']}", "", f"`python benchmarks/verdicts/run.py {rows[0]['program']}`", ""]
    lines += dict.fromkeys(
        f"- `pip install --no-deps {row['trainer']}=={row['version']} transformers=={row['transformers']}` "
        f"(asks {row['asks']}), {row['date']}" for row in rows
    )  # fmt: skip
    lines += ["", "| version | way | samples | folders | eager | sdpa | flash |", f"|{'---|' * 7}"]
    cells: dict[tuple[str, ...], dict[str, str]] = {}  # kernels of a way may be in rows of their own
    whys: dict[str, int] = {}
    for row in rows:
        own = cells.setdefault(itemgetter("version", "says", "samples", "folder")(row), {})
        own |= {kernel: cell(row, kernel, whys) for kernel in row["kernels"]}
    together: dict[tuple[str, ...], list[str]] = {}
    for (*way, folder), own in cells.items():
        together.setdefault((*way, *(own.get(kernel, "-") for kernel in KERNELS)), []).append(folder)
    for (version, says, samples, *said), folders in together.items():
        lines.append(f"| {' | '.join([version, says, samples, named(folders), *said])} |")
    reasons = [f"{number}. {why}" for why, number in whys.items()]
    return "\n".join([*lines, "", *reasons, *["" for _ in reasons[:1]], *apart]).rstrip()


def cell(row: dict[str, Any], kernel: str, whys: dict[str, int]) -> str:
    """Return a verdict in a cell; whether the second program finds the same leak, sample for sample, and what the
    trainer says against the setting; of what did not run the number of the reason, which is added to `whys`."""
    said: str = row["kernels"][kernel]
    if said.startswith("leaks"):
        confirmed = "confirmed" if row["confirmed"][kernel] == row["sees"][kernel] else "not confirmed"
        return f"{said} ({'; '.join(filter(None, (confirmed, row['against'].get(kernel))))})"
    if not said.startswith(("runs", "not run", "refuses")):
        return said
    why = next(one for one in row["faults"] if one.startswith("runs: ")) if said.startswith("runs") else said
    why = re.sub(r"\b\d+\b", "n", re.sub("^(not run|refuses|runs): (the collator fails: )?", "", why))
    return f"{word(row, kernel)} ({whys.setdefault(why, len(whys) + 1)})"


def read_table(read: Sequence[dict[str, str]]) -> str:
    """Return what was read in sources, a line each."""
    lines = ["| trainer, version | file | function | what it does |", "|---|---|---|---|"]
    for one in read:
        who, where = f"{one['trainer']} {one['version']}", f"{one['file']} | `{one['function']}`"
        lines.append(f"| {who} | {where} | {one['says']} |")
    return "\n".join(lines)


def record(rows: Sequence[dict[str, Any]]) -> None:
    """Write rows in place of those of their trainer, version, way and transformers, and the page."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": [], "read": []}
    key = itemgetter("trainer", "version", "way", "transformers")
    new = set(map(key, rows))
    kept = [row for row in found["rows"] if key(row) not in new]
    ranked = sorted([*kept, *rows], key=lambda row: (ORDER.index(row["trainer"]), -_number(row["version"])))
    RESULTS.write_text(json.dumps(found | {"rows": ranked}, indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


def _number(version: str) -> int:
    """Return a version as one number, later ones larger."""
    first, second, third = (int(part) for part in version.split(".")[:3])
    return (first * 1000 + second) * 1000 + third


if __name__ == "__main__":
    print(page(json.loads(RESULTS.read_text())), end="")
