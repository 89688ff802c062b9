"""Compare runs over the same samples: their metrics, and ratios of samples a second, that to the baseline last.

python examples/demo/compare.py --baseline RUN [--run RUN ...] --run RUN

What other work on the machine cannot change comes first. Seconds are compared where the runs took turns
(examples/demo/take_turns.py): of the median iteration of all rounds in which other programs did little.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.demo.take_turns import Turn, turns_of
from omnibal_ext.console import print_json, print_table, say_wrapped
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.flags import ToolParser
from omnibal_ext.launch.folder import METRICS
from omnibal_ext.plan import Plan
from omnibal_ext.reading.checks import finite, record
from omnibal_ext.reading.document import read_json
from omnibal_ext.run_metrics import evaluations, training_intervals

EVALUATION = record({"share_right": finite(0, 1), "standard_error": finite(0, 1)})
"""The schema of evaluation.json of examples/demo/evaluate.py."""
ERROR = "_standard_error"
"""Suffix of the name of a figure's standard error."""
BUSY, LEAST = 0.1, 3
"""Other programs' share of the processors that disturbs a round; undisturbed rounds for a comparison."""


def main() -> None:
    """Print metrics and evaluations of the runs in one table."""
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", required=True, help="folder of omnibal launch --run-dir")
    parser.add_argument("--run", required=True, action="append", help="compared with the others: the last one")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folders = [arguments.baseline, *arguments.run]
    runs = [summary(Path(folder)) for folder in folders]
    compared = compare([turns_of(Path(folder)) for folder in folders], [run["samples_an_iteration"] for run in runs])
    if arguments.json:
        print_json({"runs": dict(zip(folders, runs, strict=True)), **asdict(compared)})
        return
    names = [Path(folder).name for folder in folders]
    figures = dict.fromkeys(name for run in runs for name in run)
    rows = [
        (name.replace("_", " "), *(cell(run, name) for run in runs)) for name in figures if not name.endswith(ERROR)
    ]
    print_table("Same samples, same machine", ("", *names), rows)
    say_wrapped(*said(names, compared))


@dataclass(frozen=True)
class Compared:
    """How fast the last of several runs is, by rounds in which each had a turn."""

    ratios: list[tuple[float, float, float]]
    """Against each of the others, in the rounds that are counted: that of the median iterations, and the least and most
    of a round. Empty: the runs took no turns, or the machine was too busy."""
    rounds: int
    disturbed: dict[int, float]
    """Round that is left out -> share of the machine's processors that other programs had in it."""


def compare(turns: Sequence[Sequence[Turn]], samples: Sequence[float]) -> Compared:
    """Compare runs by their turns and their samples an iteration."""
    by_round = [{turn.round: turn for turn in run} for run in turns]
    common = sorted(set.intersection(*(set(run) for run in by_round)))
    others = {number: max(run[number].others for run in by_round) for number in common}
    disturbed = {number: share for number, share in others.items() if share > BUSY}
    quiet = [number for number in common if number not in disturbed]
    if len(quiet) < LEAST or len(quiet) < len(disturbed):
        return Compared([], len(common), disturbed)
    counted = [[run[number].seconds for number in quiet] for run in by_round]
    *before, last = (
        [statistics.median(seconds) / size for seconds in (chain.from_iterable(rounds), *rounds)]
        for rounds, size in zip(counted, samples, strict=True)
    )
    found = [[one / own for one, own in zip(other, last, strict=True)] for other in before]
    return Compared([(each[0], min(each[1:]), max(each[1:])) for each in found], len(common), disturbed)


def said(names: Sequence[str], compared: Compared) -> list[str]:
    """The comparison in words, that with the baseline last."""
    lines, shares = list[str](), compared.disturbed.values()
    if not compared.rounds:
        lines.append("Seconds are not compared: these runs took no turns (examples/demo/take_turns.py).")
    elif not compared.ratios and not shares:
        lines.append(f"Seconds are not compared: there were {compared.rounds} rounds; {LEAST} are needed.")
    elif not compared.ratios:
        lines.append(
            f"Seconds are not compared: the machine was too busy. In {len(shares)} of {compared.rounds} rounds other "
            f"programs had {min(shares):.0%} to {max(shares):.0%} of its processors. The rows of the table above "
            '"processor ms" do not depend on that.'
        )
    elif shares:
        left_out = ", ".join(f"{number} ({share:.0%})" for number, share in compared.disturbed.items())
        lines.append(f"Rounds that are left out, with other programs' share of the processors: {left_out}.")
    count = compared.rounds - len(shares)
    for name, (median, least, most) in reversed(list(zip(names, compared.ratios, strict=False))):
        lines.append(
            f"{names[-1]} / {name} samples a second: {median:.2f}x ({least:.2f} to {most:.2f} in {count} rounds)"
        )
    return lines


def summary(folder: Path) -> dict[str, Any]:
    """The figures of a run, what other work on the machine cannot change first. Raises UserError without metrics."""
    path = folder / METRICS
    lines = training_intervals(path)
    if not lines:
        raise UserError(f"{path}: no metrics; has this run been started by omnibal launch and ended an interval?")
    samples, turns = sum(line["samples"] for line in lines), turns_of(folder)
    result = {
        "samples": samples,
        "iterations": lines[-1]["iteration"],
        "samples_an_iteration": samples / lines[-1]["iteration"],
        "padding": statistics.fmean(line["padding"] for line in lines),
        **{name: _mean_of_iterations(lines, name) for name in ("dist_ratio_vit", "dist_ratio_llm")},
        "recomputed_layers": sum(len(stage.recompute) for stage in Plan.load(folder / "plan.json").stages),
        "final_loss": final_loss(lines),
    }
    if held_out := evaluations(path):
        result["held-out_loss"] = held_out[max(held_out)]["loss"]
    evaluation = folder / "evaluation.json"
    if evaluation.exists():
        found = read_json(evaluation, EVALUATION, "evaluate again")
        result["held-out_digits_read_right"] = found["share_right"]
        result["held-out_digits_read_right" + ERROR] = found["standard_error"]
    if turns:
        each = result["samples_an_iteration"]
        result["processor_ms_a_sample"] = statistics.median(t.processor_seconds for t in turns) / each * 1e3
        result["samples_a_second"] = each / statistics.median(second for turn in turns for second in turn.seconds)
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
