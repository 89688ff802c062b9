"""What is tried, by names: samples as a model's processor makes them, and what makes packs of them."""

import inspect
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

from megatron.vlm.prove.isolation import Collator
from omnibal_ext.errors import UserError

TRAINERS: dict[str, tuple[str, dict[str, Any]]] = {
    "omnibal": ("omnibal_ext.integrations.torch_loops:collate", {}),
    "transformers": ("transformers:DataCollatorWithFlattening", {}),
    "trl": ("trl.trainer.sft_trainer:DataCollatorForLanguageModeling", {"pad_token_id": 0, "padding_free": True}),
}
"""What packs, and the arguments of its class; other trainers' needs their tokenizer or template."""


def collator_of(trainer: str | None, name: str | None, config: Any) -> Collator:
    """A trainer's, or what MODULE:NAME names: a function of a list of samples, and of the model's `config` if it has an
    argument of that name."""
    where, arguments = TRAINERS[trainer] if trainer else (name or "", {})
    found = named(where, f"pip install {trainer}" if trainer else "give MODULE:FUNCTION, from this folder")
    collator = found(**arguments) if isinstance(found, type) else found
    return partial(collator, config=config) if "config" in inspect.signature(collator).parameters else collator


def samples_of(name: str, count: int) -> list[Any]:
    """The first samples of what MODULE:NAME names: anything that yields them, or a function that returns that."""
    found = named(name, "give MODULE:NAME of a list of features")
    return [*islice(found() if callable(found) else found, count)]


def named(name: str, remedy: str) -> Any:
    """What MODULE:NAME names. Raises UserError if there is none."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"{name}: {error}; {remedy}") from error
