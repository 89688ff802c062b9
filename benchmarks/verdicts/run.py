"""What `omnibal prove` says of a trainer's own packs; leaks are confirmed by `confirm.py`.

    python benchmarks/verdicts/run.py trl [--folders /tmp/folders] [--record] [--ways packing]

The trainer that is installed is asked: `pip install trl==1.16.0` and what it imports. Small folders are written where
they are not there yet. Prints a row for each way to pack, samples and folder; `--record` writes them to
`benchmarks/results/verdicts.json` in place of that version's, and docs/verdicts.md anew. Exit code 1: a leak was not
confirmed.
"""

import argparse
import datetime
import importlib
import re
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.verdicts import page
from benchmarks.verdicts.confirm import confirmed
from benchmarks.verdicts.folders import samples_of, write
from megatron.vlm.prove.isolation import Proof, prove
from megatron.vlm.prove.models import load
from omnibal_ext.console import print_table, say_wrapped
from omnibal_ext.errors import run_tool

TRAINERS = ("trl", "swift", "llamafactory", "axolotl", "automodel")
Row = dict[str, Any]


def rows_of(name: str, folders: Path, ways: list[str]) -> Iterator[Row]:
    """Yield what is said of each way, kind of samples and folder."""
    module = f"benchmarks.verdicts.with_{name}"
    trainer = importlib.import_module(module)
    for way, how in trainer.WAYS.items():
        for samples, kind in ((samples, kind) for samples in how.samples for kind in how.kinds):
            if ways and way not in ways:
                continue
            model, images = load(folders / kind, 0), samples == "images"
            collate = partial(getattr(trainer, way), config=model.config)
            proof = prove(model, samples_of(kind, images), collate, how.kernels)
            checks = {one.check for one in proof.findings}
            yield {
                "trainer": trainer.PACKAGE, "version": version(trainer.PACKAGE), "way": way, "says": how.says,
                "samples": samples, "folder": kind, "program": name,
                "kernels": {kernel: verdict(proof, kernel, how.refusal) for kernel in how.kernels},
                "against": dict(how.against),
                "faults": [f"{one.check}: {one.says}" for one in proof.findings], "sees": proof.sees,
                "confirmed": confirmed(folders / kind, collate, images) if "isolation" in checks else None,
                "transformers": version("transformers"), "asks": asked(trainer.PACKAGE),
                "date": datetime.date.today().isoformat(),
            }  # fmt: skip


def asked(package: str) -> str:
    """Return which versions of transformers a package asks for."""
    found = (re.match(r"transformers(?:\[\w+\])?([<>=!][^;]*)$", one) for one in requires(package) or ())
    return next((one[1].strip() for one in found if one), "any")


def verdict(proof: Proof, kernel: str, refusal: str | None) -> str:
    """Return one kernel's verdict of a pack in a word, with what else differs, or why it was not run; `refusal`: words
    of the error that is the trainer's no."""
    if kernel in proof.not_run:
        why = proof.not_run[kernel]
        return f"{'refuses' if refusal and refusal in why else 'not run'}: {why}"
    wrong = {one.check for one, kernels in proof.findings.items() if kernel in kernels}
    if not wrong:
        return "equal"
    causes = [check for check in ("runs", "tokens", "labels", "media", "positions", "normaliser") if check in wrong]
    named = "leaks" if "isolation" in wrong else ""
    rest = causes or [check for check in ("logits", "loss", "gradients") if check in wrong and not named]
    return "; ".join(filter(None, [named, ", ".join(rest)]))


def unconfirmed(row: Row) -> list[str]:
    """Return kernels under which `prove` names a leak that the second program does not find as it does."""
    leaking = (kernel for kernel, said in row["kernels"].items() if said.startswith("leaks"))
    return [kernel for kernel in leaking if (row["confirmed"] or {}).get(kernel) != row["sees"][kernel]]


def main() -> None:
    """Ask, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("--folders", type=Path, default=Path(tempfile.gettempdir()) / "omnibal-verdicts")
    parser.add_argument("--ways", nargs="*", default=[], help="of the trainer's; all unless told otherwise")
    parser.add_argument("--record", action="store_true", help="in the results and the page")
    given = parser.parse_args()
    write(given.folders)
    rows = list(rows_of(given.trainer, given.folders, given.ways))
    kernels = ("eager", "sdpa", "flash")
    cells = [
        (row["way"], row["samples"], row["folder"], *(row["kernels"].get(one, "") for one in kernels)) for row in rows
    ]
    print_table(f"{rows[0]['trainer']} {rows[0]['version']}", ("way", "samples", "folder", *kernels), cells)
    doubtful = [f"{row['way']}, {row['folder']}: not confirmed under {one}" for row in rows for one in unconfirmed(row)]
    say_wrapped(*doubtful)
    if given.record:
        page.record(rows)
    sys.exit(bool(doubtful))


if __name__ == "__main__":
    run_tool(main)
