"""Silences messages that other packages print while a run starts."""

import logging
import warnings

# Warnings about packages that are optional here, or deprecated calls inside Megatron.
OPTIONAL = (
    r"Transformer Engine and Apex are not installed",
    r"Apex is not installed",
    r"Only transformer-engine>=",
    r"MimoModelConfig is experimental",
    r"\s*It is recommended to use a ModelConfig",
    r"`torch.distributed.\w+` is deprecated",
)
# They log every weight of every bucket, every field of a configuration, every file opened.
WORDY = (
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.datasets",
    "megatron.core.num_microbatches_calculator",
    "megatron.core.tokenizers",
)


def silence_optional_packages() -> None:
    """Hide warnings about packages that are optional here; called before `megatron.core` is imported."""
    for message in OPTIONAL:
        warnings.filterwarnings("ignore", message)


def quieten_start_up() -> None:
    """Set loggers that name every weight and file to warnings; `--logging-level` undoes it."""
    for name in WORDY:
        logging.getLogger(name).setLevel(logging.WARNING)


def leave_out_estimates() -> None:
    """Remove the estimate of memory that Megatron's loop prints, which covers the language model only.

    Our own is in the preflight checks, measured bytes in the line of each interval.
    """
    from megatron.training import training

    training.report_theoretical_memory = lambda *_, **__: None
