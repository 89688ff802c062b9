"""Output of a run's metrics: a log line, a line of metrics.jsonl, TensorBoard and W&B through Megatron's writers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from megatron.training import get_tensorboard_writer, get_wandb_writer, print_rank_last

from omnibal_ext.costs.corrected import WHOLE, Compared
from omnibal_ext.files.records import JsonLines
from omnibal_ext.modalities.modality import FURTHER
from omnibal_ext.output import printable, say
from omnibal_ext.run_metrics import PROFILE_CHECK, loss_text

RATES = (
    "samples_per_second", "useful_tokens_per_second", "padding", "dist_ratio_vit", "dist_ratio_llm",
    "dist_ratio_attention", *(one.dist_ratio for one in FURTHER), "epoch", "model_tflops", "mfu", "bubble",
    "replaced_samples", "skipped_steps",
)  # fmt: skip
TOLERANCE = 0.05
"""Relative difference between a step and the profile above which replanning is advised."""


class Journal:
    """A writer of metrics to the log, metrics.jsonl, TensorBoard and W&B; the last rank writes, as in Megatron."""

    def __init__(self, metrics_file: str | None) -> None:
        self.metrics = JsonLines(Path(metrics_file)) if metrics_file else None

    def training(self, iteration: int, report: Mapping[str, Any]) -> None:
        """Write the report of the interval that ended with this iteration: as a line, a record and curves."""
        print_rank_last(printable(training_line(iteration, report)))
        self._append({"iteration": iteration, **report})
        curves = {name.replace("_", "-"): report[name] for name in RATES if name in report}
        curves |= {
            f"seconds of stage {stage}": seconds for stage, seconds in enumerate(report.get("stage_seconds", ()))
        }
        curves |= {f"lm loss of {source}": loss for source, loss in report["source_losses"].items()}
        write_curves(iteration, curves)

    def evaluation(self, iteration: int, report: Mapping[str, Any]) -> None:
        """Write the report of an evaluation after this iteration: as a line, a record and curves."""
        print_rank_last(printable(evaluation_line(iteration, report)))
        self._append({"iteration": iteration, "evaluation": dict(report)})
        losses = report["source_losses"].items()
        write_curves(iteration, {f"lm loss validation of {source}": loss for source, loss in losses})

    def profile_check(
        self, iterations: Sequence[int], model_hash: str, profile_hash: str, compared: Sequence[Compared], other: str
    ) -> None:
        """Write measured against profiled seconds by part of the model, see `ProfileCheck`; called on the last rank.

        other: the profile's device if it is another one than the run's.
        """
        say(*profile_lines(iterations, compared, other))
        check = {"model_hash": model_hash, "profile_hash": profile_hash, "iterations": list(iterations)}
        check["parts"] = [asdict(one) for one in compared]
        self._append({"iteration": iterations[-1], PROFILE_CHECK: check})

    def _append(self, record: Mapping[str, Any]) -> None:
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        if self.metrics and last:
            self.metrics.append(record)


def write_curves(iteration: int, curves: Mapping[str, float]) -> None:
    """Write {name: value} of an iteration to TensorBoard and W&B, on ranks where Megatron opened them."""
    if tensorboard := get_tensorboard_writer():
        for name, value in curves.items():
            tensorboard.add_scalar(name, value, iteration)
    if wandb := get_wandb_writer():
        wandb.log(dict(curves), iteration)


def survive_write_errors() -> None:
    """Make TensorBoard's writers that fail (disk full) warn once and write no more; training goes on.

    A record after an incomplete one could not be read.
    """
    with suppress(ImportError):
        from tensorboard.summary.writer.record_writer import RecordWriter

        for name in ("write", "flush", "close"):
            setattr(RecordWriter, name, _dropped_on_error(getattr(RecordWriter, name)))


def _dropped_on_error(method: Callable[..., None]) -> Callable[..., None]:
    @wraps(method)
    def write_or_drop(writer: Any, *arguments: Any) -> None:
        if vars(writer).get("failed"):
            return
        try:
            method(writer, *arguments)
        except OSError as error:
            writer.failed = True
            say(f"warning: TensorBoard's curves cannot be written ({error.strerror}); training goes on without them")

    return write_or_drop


def training_line(iteration: int, report: Mapping[str, Any]) -> str:
    """Return the log line of the interval that ended with an iteration."""
    there = (one for one in FURTHER if one.dist_ratio in report)
    further = "".join(f"{one.name} {report[one.dist_ratio]:.4f} " for one in there)
    return (
        f" after iteration {iteration}/{report['iterations']} | epoch {report['epoch']:.2f} | "
        f"loss {loss_text(report['loss'], 4)} | samples/s {report['samples_per_second']:.1f} | "
        f"useful tokens/s {report['useful_tokens_per_second']:,.0f} | padding {report['padding']:.1%} | "
        f"DistRatio {further}ViT {report['dist_ratio_vit']:.4f} LLM {report['dist_ratio_llm']:.4f} "
        f"attention {report['dist_ratio_attention']:.4f} |{_throughput(report)}{_operation(report)}"
    )


def profile_lines(iterations: Sequence[int], compared: Sequence[Compared], other: str = "") -> Iterator[str]:
    """Yield log lines: profiled and measured seconds by part of the model, and advice if the step differs too much.

    other: the device of a profile that is not of this one; then percents of the step are compared.
    """
    numbers, again = ", ".join(map(str, iterations)), "stop this run and start omnibal launch again with --replan"
    totals = dict.fromkeys(dict.fromkeys(one.part for one in compared), (0.0, 0.0))
    for one in compared:
        planned, measured = totals[one.part]
        totals[one.part] = planned + one.profile_seconds, measured + one.measured_seconds
    whole, unit, scales = totals.get(WHOLE, (0.0, 0.0)), "mean ms per rank and iteration", (1e3, 1e3)
    if other and all(whole):
        unit, scales = f"which is of another device ({other}); percent of the step", (100 / whole[0], 100 / whole[1])
    yield f" iterations {numbers} compared with the profile, {unit}:"
    yield f"  {'part':<12}{'profile':>12}{'measured':>12}{'measured / profile':>20}"
    for part, seconds in totals.items():
        planned, measured = (value * scale for value, scale in zip(seconds, scales, strict=True))
        shown = f"{measured / planned:.2f}" if planned else "-"
        yield f"  {part:<12}{planned:>12,.2f}{measured:>12,.2f}{shown:>20}"
    if other:
        yield f" to plan again from what this device measures, {again}"
    elif whole[0] and abs(whole[1] / whole[0] - 1) > TOLERANCE:
        ratio = whole[1] / whole[0]
        yield f" the step takes {ratio:.2f} x what the profile says; to plan again from these measurements, {again}"


def evaluation_line(iteration: int, report: Mapping[str, Any]) -> str:
    """Return the log line of an evaluation, with losses by source if there are several."""
    losses = report["source_losses"]
    sources = "".join(f" {name} {loss:.4f} |" for name, loss in losses.items()) if len(losses) > 1 else ""
    found = f"loss {loss_text(report['loss'], 6)} | {report['samples']:,} samples |"
    return f" evaluation after iteration {iteration} | {found}{sources}"


def _operation(report: Mapping[str, Any]) -> str:
    """Return the bubble, and the counts of bad samples and skipped steps if any, for a log line."""
    words = f" bubble {report['bubble']:.1%} |" if "bubble" in report else ""
    for name in ("replaced_samples", "skipped_steps"):
        words += f" {name.replace('_', ' ')} {report[name]} |" if report.get(name) else ""
    return words


def _throughput(report: Mapping[str, Any]) -> str:
    """Return FLOP/s of each device, and MFU if the device's peak is known, as part of a log line."""
    share = f", MFU {report['mfu']:.1%}" if "mfu" in report else ""
    return f" {report['model_tflops']:,.4g} TFLOP/s a device{share} |" if "model_tflops" in report else ""
