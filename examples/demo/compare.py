"""Compare runs over the same samples: their metrics, and ratios of samples a second, that to the baseline last.

python examples/demo/compare.py --baseline RUN [--run RUN ...] --run RUN
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.flags import ToolParser
from omnibal_ext.output import say
from omnibal_ext.plan import Plan
from omnibal_ext.reading.checks import finite, record
from omnibal_ext.reading.document import read_json
from omnibal_ext.run_metrics import evaluations, training_intervals

EVALUATION = record({"share_right": finite(0, 1), "standard_error": finite(0, 1)})
"""The schema of evaluation.json of examples/demo/evaluate.py."""
ERROR = "_standard_error"
"""Suffix of the name of a figure's standard error."""


def main() -> None:
    """Print metrics and evaluations of the runs in one table."""
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", required=True, help="folder of tools/launch.py --run-dir")
    parser.add_argument("--run", required=True, action="append", help="compared with the others: the last one")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folders = [arguments.baseline, *arguments.run]
    *others, last = runs = [summary(Path(folder)) for folder in folders]
    ratios = [last["samples_per_second"] / other["samples_per_second"] for other in others]
    if arguments.json:
        print_json({"runs": dict(zip(folders, runs, strict=True)), "ratios": dict(zip(folders, ratios, strict=False))})
        return
    figures = dict.fromkeys(name for run in runs for name in run)
    rows = [
        (name.replace("_", " "), *(cell(run, name) for run in runs)) for name in figures if not name.endswith(ERROR)
    ]
    names = [Path(folder).name for folder in folders]
    print_table("Same samples, same machine", ("", *names), rows)
    for name, ratio in reversed(list(zip(names, ratios, strict=False))):
        say(f"{names[-1]} / {name} samples per second: {ratio:.2f}x")


def summary(folder: Path) -> dict[str, Any]:
    """The figures of a run; rates leave out its first interval, the start-up. Raises UserError without metrics."""
    path = folder / "metrics.jsonl"
    lines = training_intervals(path)
    if not lines:
        raise UserError(f"{path}: no metrics; has this run been started by tools/launch.py and ended an interval?")
    steady = lines[1:] or lines
    samples, seconds = (sum(line[name] for line in steady) for name in ("samples", "seconds"))
    result = {
        "samples": sum(line["samples"] for line in lines),
        "iterations": lines[-1]["iteration"],
        "samples_per_second": samples / seconds,
        "padding": statistics.fmean(line["padding"] for line in lines),
        **{name: _mean_of_iterations(lines, name) for name in ("dist_ratio_vit", "dist_ratio_llm")},
        "final_loss": final_loss(lines),
        "recomputed_layers": sum(len(stage.recompute) for stage in Plan.load(folder / "plan.json").stages),
    }
    if held_out := evaluations(path):
        result["held-out_loss"] = held_out[max(held_out)]["loss"]
    evaluation = folder / "evaluation.json"
    if evaluation.exists():
        found = read_json(evaluation, EVALUATION, "evaluate again")
        result["held-out_digits_read_right"] = found["share_right"]
        result["held-out_digits_read_right" + ERROR] = found["standard_error"]
    return result


def _mean_of_iterations(lines: Sequence[Mapping[str, Any]], name: str) -> float:
    """The mean over iterations of a figure that is a mean over each interval's iterations."""
    counts = [last - before for before, last in pairwise([0, *(line["iteration"] for line in lines)])]
    return sum(line[name] * count for line, count in zip(lines, counts, strict=True)) / sum(counts)


def final_loss(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Mean loss of samples in the last tenth of a run (its last interval may be one iteration); None: all skipped."""
    last = [line for line in lines if line["iteration"] > 0.9 * lines[-1]["iteration"] and line["loss"] is not None]
    samples = sum(line["samples"] for line in last)
    return sum(line["loss"] * line["samples"] for line in last) / samples if samples else None


def cell(run: Mapping[str, Any], name: str) -> str:
    """A figure in words, with its standard error if there is one; "-" if the run has no such figure."""
    if name not in run:
        return "-"
    return f"{shown(run[name])} ± {shown(run[name + ERROR])}" if name + ERROR in run else shown(run[name])


def shown(value: float | None) -> str:
    """A figure in words."""
    if value is None or not math.isfinite(value):
        return "none" if value is None else f"{value}"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3f}"


if __name__ == "__main__":
    run_tool(main)
