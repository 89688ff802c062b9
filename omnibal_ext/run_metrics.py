"""What a run wrote: metrics.jsonl, a line an interval of training, one an evaluation and one that compares with the
profile; timeline.jsonl."""

from pathlib import Path
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import Check, finite, integer, is_number, listing, mapping, maybe, record, text
from omnibal_ext.reading.document import decode, read_json
from omnibal_ext.reading.files import open_plain

REMEDY = "take the line out, or start the run in another folder"

INPUTS = "inputs.json"
"""Beside metrics.jsonl: where the run's plan, profile and packs are."""
TIMELINE = "timeline.jsonl"
"""Beside metrics.jsonl: a line for each iteration that was recorded on every rank."""


def _figure(place: str, value: Any) -> float:
    """A loss may be infinite or no number, where training failed; null, where no token counted."""
    if not isinstance(value, float) and not is_number(value):
        raise UserError(f"{place} must be a number")
    return float(value)


_LOSSES = {"loss": maybe(_figure), "source_losses": mapping(_figure)}
_RATES = dict.fromkeys(("seconds", "samples", "samples_per_second", "useful_tokens_per_second", "padding"), _figure)
_RATES |= dict.fromkeys(("model_tflops", "mfu", "dist_ratio_vit", "dist_ratio_llm"), _figure)
_COMPARED = {"part": text, "phase": text, "profile_seconds": finite(), "measured_seconds": finite()}
PROFILE_CHECK = "profile_check"
_CHECKED = {
    "model_hash": text,
    "profile_hash": text,
    "iterations": listing(integer(), least=1),
    "parts": listing(record(_COMPARED)),
}
LINE: Check[dict[str, Any]] = record(
    {"iteration": integer()},
    {**_LOSSES, **_RATES, "evaluation": record({}, _LOSSES), PROFILE_CHECK: record(_CHECKED)},
)
"""What programs read of a line."""


def loss_text(loss: float | None, digits: int) -> str:
    """A loss for people; none where no token counted."""
    return "none" if loss is None else f"{loss:.{digits}f}"


def training_intervals(path: Path) -> list[dict[str, Any]]:
    """The intervals of training, in order; an interval that was run again after a resume counts as it last ran.

    A last line that is being written is left out; no file is no intervals.
    """
    others = {"evaluation", PROFILE_CHECK}
    return list({line["iteration"]: line for line in complete_lines(path)[0] if not others & line.keys()}.values())


def evaluations(path: Path) -> dict[int, dict[str, Any]]:
    """What the evaluations found, by the iterations of training before them."""
    return {line["iteration"]: line["evaluation"] for line in complete_lines(path)[0] if "evaluation" in line}


def profile_check(path: Path) -> dict[str, Any] | None:
    """What the run found of its profile, the last time that it looked: hashes of model and profile, iterations, and
    seconds by part (`omnibal_ext.costs.corrected.Compared`). None where it has not."""
    found = [line[PROFILE_CHECK] for line in complete_lines(path)[0] if PROFILE_CHECK in line]
    return found[-1] if found else None


def noted_inputs(folder: Path) -> dict[str, str]:
    """Where the run in a folder has its plan, profile and packs, as the launcher noted; empty where it did not."""
    path = folder / INPUTS
    return read_json(path, mapping(text), "remove it, and name the files") if path.exists() else {}


def _lines_before(path: Path, position: int) -> int:
    with open_plain(path, REMEDY) as file:
        return file.read(position).count(b"\n")


def complete_lines(path: Path, position: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The lines that were written to the end behind a position, decoded, and where the next one starts."""
    if not path.exists():
        return [], position
    with open_plain(path, REMEDY) as file:
        file.seek(position)
        written, newline, _ = file.read().rpartition(b"\n")
    lines = []
    for number, line in enumerate(written.splitlines(), 1):
        try:
            lines.append(LINE("", decode(line)))
        except UserError as error:
            place = _lines_before(path, position) + number
            raise UserError(f"{path}: line {place}: {error}; {REMEDY}") from None
    return lines, position + len(written) + len(newline)
