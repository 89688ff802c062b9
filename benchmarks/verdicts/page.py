"""docs/verdicts.md from benchmarks/results/verdicts.json: `python -m benchmarks.verdicts.page > docs/verdicts.md`.

`rows` of the file are what `run.py` saw, `read` what was read in sources; `page.md` beside this has what stands around.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks/results/verdicts.json", ROOT / "docs/verdicts.md"
FRAME = Path(__file__).with_name("page.md")
KERNELS = ("eager", "sdpa", "flash")
ORDER = (
    "trl",
    "ms-swift",
    "llamafactory",
    "axolotl",
    "nemo-automodel",
    "megatron-energon",
    "veomni",
    "megatron-bridge",
)


def page(found: dict[str, Any]) -> str:
    """Return the whole page."""
    rows = found["rows"]
    tables = [table_of([row for row in rows if row["trainer"] == one]) for one in ORDER]
    marks = {"TABLES": "\n\n".join(filter(None, tables)), "READ": read_table(found["read"])}
    text = FRAME.read_text()
    for mark, value in marks.items():
        text = text.replace(f"{{{mark}}}", value)
    return text


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return a trainer's title, command and table: a line for each version, way and samples, folders of one verdict
    together; and why what could not be run was not."""
    if not rows:
        return ""
    lines = [f"### {rows[0]['trainer']}", "", f"`python benchmarks/verdicts/run.py {rows[0]['program']}`", ""]
    lines += ["| version | way | samples | folders | eager | sdpa | flash | transformers, date |", f"|{'---|' * 8}"]
    together: dict[tuple[str, ...], list[str]] = {}
    whys: dict[str, int] = {}
    for row in rows:
        cells = tuple(cell(row, kernel, whys) for kernel in KERNELS)
        key = (
            row["version"],
            row["says"],
            row["samples"],
            *cells,
            f"{row['transformers']} (asks {row['asks']}), {row['date']}",
        )
        together.setdefault(key, []).append(row["folder"])
    for (version, says, samples, *cells, when), folders in together.items():
        lines.append(f"| {' | '.join([version, says, samples, ', '.join(folders), *cells, when])} |")
    return "\n".join([*lines, "", *(f"{number}. {why}" for why, number in whys.items())]).rstrip()


def cell(row: dict[str, Any], kernel: str, whys: dict[str, int]) -> str:
    """Return a verdict in a cell; whether the second program finds the same leak, sample for sample; of what did not
    run the number of the reason, which is added to `whys`."""
    said: str = row["kernels"].get(kernel, "-")
    if said.startswith("leaks"):
        return said + (" (confirmed)" if row["confirmed"][kernel] == row["sees"][kernel] else " (not confirmed)")
    if not said.startswith(("runs", "not run")):
        return said
    why = said if said.startswith("not run") else next(one for one in row["faults"] if one.startswith("runs: "))
    why = re.sub(r"\b\d+\b", "n", re.sub("^(not run|runs): (the collator fails: )?", "", why))
    return f"{'fails' if said.startswith('runs') else 'not run'} ({whys.setdefault(why, len(whys) + 1)})"


def read_table(read: Sequence[dict[str, str]]) -> str:
    """Return what was read in sources, a line each."""
    lines = ["| trainer, version | file | function | what it does |", "|---|---|---|---|"]
    for one in read:
        who, where = f"{one['trainer']} {one['version']}", f"{one['file']} | `{one['function']}`"
        lines.append(f"| {who} | {where} | {one['says']} |")
    return "\n".join(lines)


def record(rows: Sequence[dict[str, Any]]) -> None:
    """Write rows in place of those of their trainer, version and way, and the page."""
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": [], "read": []}
    new = {(row["trainer"], row["version"], row["way"]) for row in rows}
    kept = [row for row in found["rows"] if (row["trainer"], row["version"], row["way"]) not in new]
    ranked = sorted([*kept, *rows], key=lambda row: (ORDER.index(row["trainer"]), -_number(row["version"])))
    RESULTS.write_text(json.dumps(found | {"rows": ranked}, indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


def _number(version: str) -> int:
    """Return a version as one number, later ones larger."""
    first, second, third = (int(part) for part in version.split(".")[:3])
    return (first * 1000 + second) * 1000 + third


if __name__ == "__main__":
    print(page(json.loads(RESULTS.read_text())), end="")
