"""Reads metrics.jsonl of a run: a line for each interval of training, each evaluation, and the comparison with the
profile."""

from pathlib import Path
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.files.folders import path_noted
from omnibal_ext.reading.checks import (
    Check,
    anything,
    finite,
    integer,
    is_number,
    listing,
    mapping,
    maybe,
    record,
    text,
)
from omnibal_ext.reading.document import FIELD, decode, if_sealed, read_json
from omnibal_ext.reading.files import open_plain

REMEDY = "take the line out, or start the run in another folder"

INPUTS = "inputs.json"
"""File of the run's folder with paths of its plan, profile and packs."""
VERSIONS = "versions"
"""Key in inputs.json, besides paths."""
TIMELINE = "timeline.jsonl"
"""File of the run's folder with a line for each iteration that was recorded on every rank."""


def _figure(where: str, value: Any) -> float:
    """Check a number and return it as float; infinity and NaN, which a loss may be, pass."""
    if not isinstance(value, float) and not is_number(value):
        raise UserError(f"{where} must be a number")
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
"""The fields of a line that programs read."""


def loss_text(loss: float | None, digits: int) -> str:
    """Return a loss with so many digits, as text; "none" if there is none, as no token had weight."""
    return "none" if loss is None else f"{loss:.{digits}f}"


def training_intervals(path: Path) -> list[dict[str, Any]]:
    """Return metrics.jsonl's lines of training intervals, in order; of those repeated after a resume, the last.

    An incomplete last line is left out; without a file there are none.
    """
    others = {"evaluation", PROFILE_CHECK}
    return list({line["iteration"]: line for line in complete_lines(path)[0] if not others & line.keys()}.values())


def evaluations(path: Path) -> dict[int, dict[str, Any]]:
    """Return the results of each evaluation (losses) by the iteration after which it ran; {} without a file."""
    return {line["iteration"]: line["evaluation"] for line in complete_lines(path)[0] if "evaluation" in line}


def profile_check(path: Path) -> dict[str, Any] | None:
    """Return the run's last comparison with its profile: hashes of model and profile, iterations, and seconds by part
    (`omnibal_ext.costs.corrected.Compared`); None if there is none."""
    found = [line[PROFILE_CHECK] for line in complete_lines(path)[0] if PROFILE_CHECK in line]
    return found[-1] if found else None


def noted_inputs(folder: Path) -> dict[str, str]:
    """Return the paths and versions in a run's inputs.json by name, without its flags; {} if there is none."""
    path = folder / INPUTS
    found = read_json(path, if_sealed(mapping(anything)), "remove it, and name the files") if path.exists() else {}
    texts = {name: value for name, value in found.items() if isinstance(value, str) and name != FIELD}
    return {name: value if name == VERSIONS else str(path_noted(folder, value)) for name, value in texts.items()}


def _lines_before(path: Path, position: int) -> int:
    with open_plain(path, REMEDY) as file:
        return file.read(position).count(b"\n")


def complete_lines(path: Path, position: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Return the decoded complete lines of metrics.jsonl or timeline.jsonl behind byte `position` ([] without a file),
    and the byte at which the next one starts. Raises UserError naming a line that is damaged."""
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
            where = _lines_before(path, position) + number
            raise UserError(f"{path}: line {where}: {error}; {REMEDY}") from None
    return lines, position + len(written) + len(newline)
