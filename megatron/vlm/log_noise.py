"""What others print while a run starts, so that a user sees our lines without scrolling."""

import logging
import warnings

# Said at import or once a run, of packages that are optional here or of interfaces that are Megatron's to change.
OPTIONAL = (
    r"Transformer Engine and Apex are not installed",
    r"Apex is not installed",
    r"Only transformer-engine>=",
    r"MimoModelConfig is experimental",
    r"\s*It is recommended to use a ModelConfig",
    r"`torch.distributed.\w+` is deprecated",
)
# These list every weight of every bucket, every field of a configuration, every step of opening a file.
WORDY = (
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.datasets",
    "megatron.core.num_microbatches_calculator",
    "megatron.core.tokenizers",
)


def silence_optional_packages() -> None:
    """Hide the warnings that say nothing about a run; before `megatron.core` is first imported. Others stay."""
    for message in OPTIONAL:
        warnings.filterwarnings("ignore", message)


def quieten_start_up() -> None:
    """Let Megatron's wordy loggers speak from warnings on; `--logging-level` is the user's way to hear them."""
    for name in WORDY:
        logging.getLogger(name).setLevel(logging.WARNING)


def leave_out_estimates() -> None:
    """Have Megatron's loop print no estimate of parameters and memory: it knows the language model alone.

    What a rank needs is in the checks, and what it took in the lines of each interval.
    """
    from megatron.training import training

    training.report_theoretical_memory = lambda *_, **__: None
