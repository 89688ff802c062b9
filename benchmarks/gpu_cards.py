"""What a card did, one file each: `benchmarks/results/GPU-MODEL.json`, from which the documents' tables are made.

`benchmarks/gpu.py` writes one where it has run `training`; a figure that no part has found is "unverified".
"""

import json
import subprocess
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from omnibal_ext.costs.operations import RESULTS

UNVERIFIED = "unverified"
FIELDS = (
    "model", "card", "date", "commit", "command", "versions", "budgets", "packs an iteration", "first loss",
    "last loss", "milliseconds an iteration", "useful tokens a second", "TFLOP/s", "MFU", "GiB planned", "GiB seen",
    "step, planned over trained", "parts, planned over trained", "share of text-only TFLOP/s", "resumed, difference",
    "transformers, ours over it", "with adapters", "trace",
)  # fmt: skip
COLUMNS = {
    "card": "card", "model": "model", "milliseconds an iteration": "ms an iteration",
    "useful tokens a second": "useful tokens/s", "TFLOP/s": "TFLOP/s", "MFU": "MFU", "GiB seen": "GiB",
    "step, planned over trained": "step, planned / trained", "share of text-only TFLOP/s": "of text-only TFLOP/s",
}  # fmt: skip
"""Of the documents' table, and what they are called there."""


def card(found: Mapping[str, Any], command: str) -> dict[str, Any]:
    """The record of what `benchmarks/gpu.py` found."""
    training, against = found["training"], found.get("against", {})
    parts = {
        name: part["profile"] / part["trained"] for name, part in against.get("parts", {}).items() if part["profile"]
    }
    values = {
        "model": found["model"], "card": found["device"], "date": str(date.today()), "commit": commit(),
        "command": command, "versions": found.get("versions"), "budgets": found["budgets"],
        "packs an iteration": found["packs"], **training, "GiB seen": training["peak GiB"],
    }  # fmt: skip
    if against:
        planned, trained = against["planned"], against["trained"]
        values |= {"GiB planned": planned["GiB"], "step, planned over trained": planned["step ms"] / trained["step ms"],
                   "parts, planned over trained": parts}  # fmt: skip
    if "text" in found:
        values["share of text-only TFLOP/s"] = found["text"].get("share of its TFLOP/s with images")
    if "resume" in found:
        values["resumed, difference"] = max(found["resume"].values())
    if "peers" in found:
        paces = found["peers"]["useful tokens a second"]
        values["transformers, ours over it"] = {
            way: found["peers"]["ours"] / pace if pace else "out of memory" for way, pace in paces.items()
        }
    if "lora" in found:
        values["with adapters"] = {"model": found["adapted"], **found["lora"]}
    values["trace"] = found.get("trace")
    return {name: UNVERIFIED if values.get(name) is None else values[name] for name in FIELDS}


def with_trace(card: Mapping[str, Any], found: Mapping[str, Any], command: str) -> dict[str, Any]:
    """A card's record, its trace that of a later run, which has a date of its own."""
    run = {"date": str(date.today()), "commit": commit(), "command": command, "versions": found.get("versions")}
    return {**card, "trace": {**run, **found["trace"]}}


def commit() -> str:
    """Of this tree; "" where git does not know."""
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def cards(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """All that are there, by name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*-*.json"))]


def table(found: list[dict[str, Any]]) -> str:
    """Of cards, in Markdown."""
    rows = [list(COLUMNS.values()), ["---"] * len(COLUMNS), *([shown(one[name]) for name in COLUMNS] for one in found)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def shown(value: Any) -> str:
    """Three digits, and no more than are known."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    print(table(cards()))
