"""Model FLOPs: the operations that samples need in any implementation, the numerator of MFU.

Counted: matrix products and attention, 2 operations per multiplication, forward and backward. Not counted: padding,
recomputation, elementwise work, the head on tokens without a label, and gradients that nobody needs (of frozen weights,
of everything before the first trained layer). Attention counts once forward and twice backward (the flash kernel's
second forward is recomputation), half under the language model's causal mask, for each sample: sum(length^2). Linear
attention counts as a recurrence over tokens, whatever chunks a kernel computes.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omnibal_ext.adapters import NO_ADAPTERS, Adapters, adapter_parameters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.chain import size_of
from omnibal_ext.costs.analytic import DEVICES, Device
from omnibal_ext.costs.works import layer_works
from omnibal_ext.errors import UserError
from omnibal_ext.files.records import read_record
from omnibal_ext.modalities.modality import ALWAYS, FURTHER, LANGUAGE, MODALITIES, Size

PASSES = {"trained": 3, "adapted": 2, "frozen": 2, "idle": 1}
"""Products with a matrix, by gradient mode: forward, gradients of inputs, gradients of weights."""


@dataclass(frozen=True)
class ModelOperations:
    """Operations that a model's forward and backward need, by what they grow with."""

    units: Mapping[Size, float]
    """Operations per tile, token, mel frame (as part of a whole chunk of sound)."""
    square: float
    """Operations per squared token of a sample's length."""
    counted: float
    """Operations per token with a label."""

    @classmethod
    def of(
        cls, model: Architecture, frozen: tuple[str, ...] = (), adapters: Adapters = NO_ADAPTERS
    ) -> "ModelOperations":
        """Count the operations of a model, given its `frozen` parts and adapters."""
        periods = {one.modality.size: one.period for one in model.encoders}
        works, added = layer_works(model, periods, 1), adapter_parameters(model, adapters)
        trained = adapters.trained(frozen)
        found = dict.fromkeys((*(one.size for one in MODALITIES), "squares", "counted"), 0.0)
        counts = Counter(model.cost_kinds)
        for kind, layers in counts.items():
            work, mode = works[kind], trained.mode(kind)
            passes: float = PASSES[mode]
            matrices = 2.0 * work.tokens * work.matrix_weights * layers
            passes = min(passes, 2 + work.input_gradient)
            size = size_of(kind)
            found["counted" if kind == "head" else size] += (
                matrices * passes + 3 * 2.0 * work.tokens * added.get(kind, 0.0) * layers
            )
            attention = layers * (1 if mode == "idle" else 3)
            if size != LANGUAGE.size:
                found[size] += work.attention * attention
            found[LANGUAGE.size] += work.states * attention
            found["squares"] += work.per_square * attention
        square, counted = found.pop("squares"), found.pop("counted")
        return cls({size: operations / periods.get(size, 1) for size, operations in found.items()}, square, counted)

    def total(self, sums: Mapping[Size, float], squares: float, counted: float) -> float:
        """Return the operations of samples with these sums of sizes, squared lengths and labels."""
        # Those of `ALWAYS` first: a sum in another order would be another in its last digits.
        always, further = (
            sum(self.units[one.size] * sums.get(one.size, 0) for one in some) for some in (ALWAYS, FURTHER)
        )
        return always + self.square * squares + self.counted * counted + further


def peak_operations(device_name: str) -> float | None:
    """Return the peak dense bf16 operations a second of a GPU, by its driver's name for it; None if unknown."""
    key = device_key(device_name)
    return DEVICES[key].flops if key else None


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
EFFICIENCIES = ("matrix_efficiency", "attention_efficiency", "bandwidth_efficiency")


def device_key(name: str) -> str | None:
    """Return the key in `DEVICES` of a GPU whose driver calls it `name`; None if its peaks are unknown."""
    return next((key for key in DEVICES if key in name.lower()), None)


def measured_device(key: str, folder: Path = RESULTS) -> Device | None:
    """Return the device `key` of `DEVICES` with the efficiencies measured by benchmarks/gpu.py; None if `folder` has
    none. Raises UserError for a result file that is damaged, or has impossible figures."""
    path = folder / f"{key}.json"
    return (
        read_record(path, "result", "benchmarks/gpu.py", lambda record: _device(key, record)) if path.exists() else None
    )


def installed_attention() -> str:
    """Return "flash_attention_4" if that kernel, which analytic profiles price apart, is installed here; else ""."""
    try:
        version("flash-attn-4")
    except PackageNotFoundError:
        return ""
    return "flash_attention_4"


def _device(key: str, record: Any) -> Device | None:
    if isinstance(record, Mapping) and "efficiencies" not in record:  # of some parts of the benchmark
        return None
    found = record.get("efficiencies") if isinstance(record, Mapping) else None
    if not isinstance(found, Mapping) or set(found) != set(EFFICIENCIES):
        raise UserError(f"'efficiencies' must have {', '.join(EFFICIENCIES)}")
    for name, share in found.items():
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise UserError(f"{name} must be a share of the published peak, above 0 and at most 1, got {share!r}")
    return replace(DEVICES[key], **found, attention_kernels={})  # measured with the kernel that is there
