"""`--measure-top-k`: trial runs of a plan's best layouts for a few steps; the fastest is kept."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from omnibal_ext.console import print_table, track
from omnibal_ext.errors import UserError
from omnibal_ext.launch.folder import METRICS, PLAN
from omnibal_ext.launch.processes import run_to_end
from omnibal_ext.plan import Plan
from omnibal_ext.run_metrics import training_intervals

STEPS = 3
"""Steps of a trial; the first is a warm-up."""
DROPPED_FLAGS = (
    # saves and loads
    "--save*", "--load", "--from*", "--pretrained-checkpoint", "--finetune", "--persistent-save-interval",
    "--no-save-*", "--no-load-*", "--async-*", "--use-persistent-ckpt-worker", "--*ckpt-*", "--verify-integrity",
    "--exit-on-missing-checkpoint", "--override-opt*-scheduler", "--use-checkpoint-opt*-scheduler",
    # evaluates, logs, profiles, ends
    "--eval-*", "--start-eval-at-iter", "--skip-train", "--log-interval", "--log-memory-interval", "--timelines",
    "--*tensorboard*", "--log-validation-ppl-*", "--wandb-*", "--*profile*", "--record-shapes", "--nvtx-ranges",
    "--exit-interval",
)  # fmt: skip
"""Patterns of flags that trials do not get: they save and evaluate nothing, and start from random weights."""


Trial = tuple[Plan, float | None]
"""A layout and its measured seconds per step; None: the trial failed."""


def layouts(plan: Plan, count: int) -> list[Plan]:
    """Return the plan and its next best layouts, at most `count` in total."""
    return [plan, *(plan.alternative(i) for i in range(min(count - 1, len(plan.alternatives))))]


def trial_flags(words: Sequence[str]) -> list[str]:
    """Return the flags of a trial, which ends after `STEPS`: the run's without `DROPPED_FLAGS` and their values."""
    kept, skipping = [], False
    for word in words:
        if word.startswith("--"):
            skipping = any(fnmatchcase(word.partition("=")[0], pattern) for pattern in DROPPED_FLAGS)
        if not skipping:
            kept.append(word)
    return [*kept, "--from-scratch", "--log-interval", "1", "--exit-interval", str(STEPS)]


def measured_seconds(metrics: Path) -> float | None:
    """Return the median seconds of a trial's steps without the first; None if it failed."""
    lines = training_intervals(metrics)
    if len(lines) < STEPS:
        return None
    return statistics.median(line["seconds"] for line in lines[1:STEPS])


def keep_fastest(trials: Sequence[Trial]) -> Plan:
    """Return the plan of the fastest layout, with the figures of all trials. Raises UserError if all failed."""
    ran = [(seconds, number) for number, (_, seconds) in enumerate(trials) if seconds is not None]
    if not ran:
        raise UserError(f"none of {len(trials)} layouts ran {STEPS} steps; see the logs of the trials")
    _, best = min(ran)
    figures = tuple(
        {
            "stages": [stage.to_record() for stage in plan.stages],
            "predicted_step_seconds": plan.predicted["step_seconds"],
            "measured_step_seconds": seconds,
            "kept": number == best,
        }
        for number, (plan, seconds) in enumerate(trials)
    )
    return replace(trials[best][0], trials=figures)


def measured_best(plan: Plan, count: int, folder: Path, command: Callable[[Path, Path], list[str]]) -> Plan:
    """Run the plan's `count` best layouts for a few steps each, and keep the fastest.

    `command(plan.json, metrics.jsonl)` is the command line of a trial.
    """
    trials, candidates = [], layouts(plan, count)
    for number, candidate in enumerate(track(candidates, "measuring layouts", len(candidates))):
        trial = folder / str(number)
        candidate.save(trial / PLAN)
        metrics = trial / METRICS
        metrics.unlink(missing_ok=True)  # of an interrupted trial
        with (trial / "log").open("w") as log:
            run_to_end(command(trial / PLAN, metrics), stdout=log, stderr=log)
        trials.append((candidate, measured_seconds(metrics)))
    return keep_fastest(trials)


def print_trials(plan: Plan) -> None:
    """Print predicted and measured step time of the layouts."""
    rows = [
        (
            ", ".join(str(stage["layers"][1] - stage["layers"][0]) for stage in trial["stages"]),
            sum(len(stage["recompute"]) for stage in trial["stages"]),
            f"{trial['predicted_step_seconds'] * 1e3:.1f}",
            f"{trial['measured_step_seconds'] * 1e3:.1f}" if trial["measured_step_seconds"] else "failed",
            "kept" if trial["kept"] else "",
        )
        for trial in plan.trials
    ]
    print_table("layouts measured", ("layers a stage", "recomputed", "predicted ms", "measured ms", ""), rows)
