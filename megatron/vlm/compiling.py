"""Compiles small functions once for all packs, whose tensors differ in the number of rows (axis 0).

torch.compile treats sizes as static at first, and compiles again with dynamic rows when another size comes. Here rows
are marked as dynamic before the first compilation.
"""

from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

MOST_FORMS = 64
"""Compilations of a function, for each width with gradients and without; torch stops after eight by default."""


def for_any_rows(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `compiler` (`torch.compile`) whose functions take any number of rows.

    Other axes stay static. What the compiler returns unchanged is returned unchanged.
    """

    def compiled(function: Any = None, **options: Any) -> Any:
        if function is None:
            return partial(compiled, **options)
        launch = compiler(function, **options)
        if launch is function or not isinstance(function, FunctionType):
            return launch
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_FORMS)
        if options.get("dynamic"):  # all sizes of all inputs
            return launch

        @wraps(function)
        def launched(*arguments: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling():  # inside another compiled function
                return function(*arguments, **named)
            mark_rows(arguments)
            mark_rows(named.values())
            return launch(*arguments, **named)

        return launched

    return compiled


def mark_rows(arguments: Iterable[Any]) -> None:
    """Mark axis 0 of tensors as dynamic, not of parameters; "maybe": torch may still specialise it."""
    for one in arguments:
        if type(one) is Tensor:
            torch._dynamo.maybe_mark_dynamic(one, 0)
        elif type(one) is tuple:
            mark_rows(one)
