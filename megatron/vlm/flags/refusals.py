"""Turns Megatron's assertions and exceptions about arguments into one line."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omnibal_ext.errors import UserError


@contextmanager
def megatron_refusals() -> Iterator[None]:
    """Context in which any exception of Megatron's parsing and validation becomes a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"Megatron refuses these flags: {_said(error)}") from error


def _said(error: Exception) -> str:
    """Return the error's text in one line; for an assertion without text, its condition and place."""
    if text := " ".join(str(error).split()):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    condition = (frame.line or "").removeprefix("assert ").replace("args.", "")
    return f"{condition} does not hold ({Path(frame.filename).name}:{frame.lineno})"
