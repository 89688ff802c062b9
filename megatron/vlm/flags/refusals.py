"""Megatron's own refusals as one line: its assertions and exceptions about arguments."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omnibal_ext.errors import UserError


@contextmanager
def megatron_refusals() -> Iterator[None]:
    """Around Megatron's parsing and validating: whatever it raises becomes a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"Megatron refuses these flags: {_said(error)}") from error


def _said(error: Exception) -> str:
    """The error's text in one line; of an assertion without text, what does not hold and where."""
    if text := " ".join(str(error).split()):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    condition = (frame.line or "").removeprefix("assert ").replace("args.", "")
    return f"{condition} does not hold ({Path(frame.filename).name}:{frame.lineno})"
