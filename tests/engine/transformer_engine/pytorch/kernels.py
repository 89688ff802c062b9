"""Marks what is one kernel in Transformer Engine."""

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """The function itself; those who count kernels put another `run` here."""

    def launch(*arguments: Any) -> Any:
        return run(function, *arguments)

    return launch  # type: ignore[return-value]


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Compute it."""
    return function(*arguments)
