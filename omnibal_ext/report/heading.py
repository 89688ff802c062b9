"""The first lines of a report: model, device, ranks, date, versions and TFLOP/s, as far as they are known."""

from omnibal_ext.plan_tower import choice_in_words
from omnibal_ext.report.subject import Subject


def heading(subject: Subject) -> list[tuple[str, str]]:
    """Return (what, value) pairs of all that is known."""
    plan, profile = subject.plan, subject.profile
    adapters = [f"adapters of rank {plan.lora_rank} on {' and '.join(plan.lora_targets)}"] * bool(plan.lora_rank)
    measured = "measured" if profile.measured_with else "counted, not measured"
    heard = f" and {plan.audio_budget:,} mel frames" if plan.audio_budget > 1 else ""
    shape = f"{plan.num_microbatches} microbatches a rank, schedule {plan.schedule}"
    found = [
        ("model", ", ".join([plan.model, *(f"{part} frozen" for part in plan.frozen), *adapters])),
        ("profile", ", ".join(filter(None, [profile.device, profile.dtype, measured]))),
        ("ranks", _ranks(subject)),
        ("iteration", shape),
        ("vision tower", choice_in_words(tower, plan.tower) if (tower := plan.predicted.get("tower")) else ""),
        ("pack", f"at most {plan.vit_budget:,} tiles and {plan.llm_budget:,} tokens{heard}"),
        ("run" if subject.metrics else "plan", subject.date),
        ("versions", subject.versions),
        ("model's own work", _speed(subject)),
    ]
    return [(what, value) for what, value in found if value]


def _ranks(subject: Subject) -> str:
    """Return parallel sizes; the data-parallel size only if packs or a recorded iteration have it."""
    plan = subject.plan
    sizes = {
        "tensor": plan.tensor_model_parallel_size,
        "pipeline": plan.pipeline_model_parallel_size,
        "virtual pipeline": plan.virtual_pipeline_model_parallel_size,
        "expert": plan.expert_model_parallel_size,
    }
    words = [f"{name} {size}" for name, size in sizes.items() if size > 1 or name in ("tensor", "pipeline")]
    if subject.measured:
        words.append(f"data {len({lane.data_parallel_rank for lane in subject.measured.lanes})}")
    elif subject.index:
        words.append(f"data {subject.index.global_batch // plan.num_microbatches}")
    return ", ".join(words)


def _speed(subject: Subject) -> str:
    """Return the run's TFLOP/s and MFU: means over its intervals, weighted by seconds."""
    lines = [line for line in subject.intervals if "model_tflops" in line]
    if not lines:
        return ""
    seconds = sum(line["seconds"] for line in lines)
    mean = {
        name: sum(line[name] * line["seconds"] for line in lines) / seconds
        for name in ("model_tflops", "mfu")
        if all(name in line for line in lines)
    }
    share = f", MFU {mean['mfu']:.1%}" if "mfu" in mean else ""
    return f"{mean['model_tflops']:,.4g} TFLOP/s a device{share}"
