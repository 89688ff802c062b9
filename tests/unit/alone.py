"""Megatron in the test's own process, on one rank."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron.vlm.arguments import TrainingInputs
from megatron.vlm.single import single_process
from omnibal_ext.architectures import presets
from tests.distributed import harness


@contextmanager
def megatron_alone(preset: str, *flags: str) -> Iterator[TrainingInputs]:
    """Initialised for a preset, the harness's models among them; afterwards the process is as before.

    For fixtures: a failing test must not leave it by its error.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        for name, model in harness.MODELS.items():
            patch.setitem(presets.PRESETS, name, model)
        with single_process(preset, flags) as inputs:
            yield inputs
