"""Small functions are compiled once for all packs, which differ in their rows: axis 0 of what the functions take.

Torch's compiler takes every size that it sees for one that stays, and compiles again for any number of rows once
another comes. Told beforehand it does so at once, and a pack of another size finds all compiled.
"""

from collections.abc import Callable, Iterable
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

MOST_FORMS = 64
"""Of a function, for each width with gradients and without: behind torch's eight it would be compiled no more."""


def for_any_rows(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """What takes the place of `compiler`, which is `torch.compile`: functions are compiled for any number of rows.

    Widths stay those that a function is compiled for. What the compiler gives back as it is stays so.
    """

    def compiled(function: Any = None, **options: Any) -> Any:
        if function is None:
            return partial(compiled, **options)
        launch = compiler(function, **options)
        if launch is function or not isinstance(function, FunctionType):
            return launch
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_FORMS)

        @wraps(function)
        def launched(*arguments: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling():  # as a part of another
                return function(*arguments, **named)
            _mark_rows(arguments)
            _mark_rows(named.values())
            return launch(*arguments, **named)

        return launched

    return compiled


def _mark_rows(arguments: Iterable[Any]) -> None:
    """Not those of weights, which stay. A size that turns out to be that of one which stays does so too."""
    for one in arguments:
        if type(one) is Tensor:
            torch._dynamo.maybe_mark_dynamic(one, 0)
        elif type(one) is tuple:
            _mark_rows(one)
