"""Efficiencies measured by `benchmarks/gpu.py`, used instead of those that analytic profiles assume."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omnibal_ext.costs.analytic import DEVICES, Device
from omnibal_ext.errors import UserError
from omnibal_ext.files.records import read_record

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
EFFICIENCIES = ("matrix_efficiency", "attention_efficiency", "bandwidth_efficiency")


def device_key(name: str) -> str | None:
    """Return the key in `DEVICES` of a GPU whose driver calls it `name`; None if its peaks are unknown."""
    return next((key for key in DEVICES if key in name.lower()), None)


def measured_device(key: str, folder: Path = RESULTS) -> Device | None:
    """Return the device `key` with measured efficiencies; None if not measured.

    Raises UserError for a result file that is damaged, or has impossible figures.
    """
    path = folder / f"{key}.json"
    return (
        read_record(path, "result", "benchmarks/gpu.py", lambda record: _device(key, record)) if path.exists() else None
    )


def _device(key: str, record: Any) -> Device:
    found = record.get("efficiencies") if isinstance(record, Mapping) else None
    if not isinstance(found, Mapping) or set(found) != set(EFFICIENCIES):
        raise UserError(f"'efficiencies' must have {', '.join(EFFICIENCIES)}")
    for name, share in found.items():
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise UserError(f"{name} must be a share of the published peak, above 0 and at most 1, got {share!r}")
    return replace(DEVICES[key], **found)
