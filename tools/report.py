"""Show a plan or runs as one HTML page: where the time of every rank goes, what limits it, what to change.

    omnibal report --run RUN [--run OTHER ...] --output report.html
    omnibal report --plan plan.json --profile profile.json --output report.html --trace trace.json

The page needs no network. The trace opens in ui.perfetto.dev and chrome://tracing.
"""

import argparse
import json
from pathlib import Path

from omnibal_ext.console import print_json, print_table
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.files.records import write_text
from omnibal_ext.flags import ToolParser
from omnibal_ext.output import say
from omnibal_ext.report.breakdown import CAUSES, breakdown
from omnibal_ext.report.page import report
from omnibal_ext.report.subject import Subject
from omnibal_ext.report.trace import trace


def main() -> None:
    """Write the page and the trace that flags ask for; print where the time goes."""
    arguments = _parser().parse_args()
    subjects = _subjects(arguments)
    timelines = [timeline for subject in subjects for timeline in subject.timelines]
    written = {}
    if arguments.output:
        write_text(Path(arguments.output), report(subjects))
        written["report"] = arguments.output
    if arguments.trace:
        write_text(Path(arguments.trace), json.dumps(trace(timelines)))
        written["trace"] = arguments.trace
    names = [f"{subject.name}, {timeline.name}" for subject in subjects for timeline in subject.timelines]
    found = {name: breakdown(timeline) for name, timeline in zip(names, timelines, strict=True)}
    if arguments.json:
        seconds = {name: timeline.seconds for name, timeline in zip(names, timelines, strict=True)}
        print_json({"written": written, "step_seconds": seconds, "shares": found})
        return
    rows = [(cause, *(f"{shares[cause]:.1%}" for shares in found.values())) for cause in CAUSES]
    print_table("Share of all ranks' time", ("", *found), rows)
    for what, path in written.items():
        say(f"{what}: {path}")


def _subjects(arguments: argparse.Namespace) -> list[Subject]:
    """Read the plans and runs, in the flags' order. Raises UserError if there are none, or no output is asked for."""
    if not (arguments.run or arguments.plan):
        raise UserError("nothing to report on: give --run FOLDER of omnibal launch, or --plan plan.json")
    if not (arguments.output or arguments.trace):
        raise UserError("nothing to write: give --output report.html or --trace trace.json")
    profile = Path(arguments.profile) if arguments.profile else None
    packs = Path(arguments.packs) if arguments.packs else None
    if len(arguments.plan) == len(arguments.run) == 1:
        return [Subject.of_run(Path(arguments.run[0]), Path(arguments.plan[0]), profile, packs)]
    plans = [Subject.of_plan(Path(plan), profile, packs) for plan in arguments.plan]
    return plans + [Subject.of_run(Path(run), None, profile, packs) for run in arguments.run]


def _parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--run", action="append", default=[], help="run folder of omnibal launch; again for more")
    add("--plan", action="append", default=[], help="plan.json alone, or of the one --run; again for more")
    add("--profile", help="its profile.json (default: the one next to the plan)")
    add("--packs", help="packed index to predict on (default: the run's, or full budgets)")
    add("--output", metavar="FILE", help="write the page")
    add("--trace", metavar="FILE", help="write the timelines in Chrome's trace format, for Perfetto")
    add("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    run_tool(main)
