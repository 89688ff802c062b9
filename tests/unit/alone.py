"""Megatron in the test's own process, on one rank."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.utils import get_model_config

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


@contextmanager
def trainer_alone(preset: str, *flags: str) -> Iterator[tuple[Any, Any]]:
    """A trainer as the command line makes it, for packs that no dataset holds; and its model as Megatron has it."""
    from megatron.vlm.pretrain import Trainer

    with megatron_alone(preset, *flags) as inputs, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "sources", staticmethod(lambda _: ("made up",)))
        trainer = Trainer(inputs)
        model = harness.get_model(trainer.model, ModelType.encoder_or_decoder)
        get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads
        yield trainer, model
