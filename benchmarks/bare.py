"""A machine with a GPU often stands in an image of its own, with torch and megatron-core and little else.

Imported before anything of the project: packages that only plan, print or read data may then be missing. Functions of
numba run as they are, tables are printed plainly; what else is asked of a missing package is an error.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

OPTIONAL = ("numba", "rich", "jinja2", "markupsafe", "sentencepiece", "PIL", "psutil", "einops", "tensorboard")
"""What parts of `benchmarks/gpu.py` do without."""


def make_do() -> tuple[str, ...]:
    """Let the project be imported without the packages of `OPTIONAL` that are not here; gives their names."""
    missing = tuple(name for name in OPTIONAL if not _is_here(name))
    if missing:
        sys.meta_path.append(_Absences(missing))
    if "rich" in missing:
        from omnibal_ext import console

        console.print_table = print_plainly  # type: ignore[assignment]
        console.track = lambda items, *_, **__: iter(items)
    return missing


def print_plainly(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], right: bool = True) -> None:
    """A table in plain text."""
    lines = [list(map(str, columns)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    print(title)
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _is_here(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # hidden: None stands in its place
        return False


class _Absences(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of missing packages, which have whatever name is asked for."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.packages:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class _Absent(ModuleType):
    """A module of a missing package."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ in ("numba", "numba.extending"):
            return _plain
        return _Kind(name, (_Missing,), {"package": self.__name__})


class _Kind(type):
    """Of a class of a missing package, which has whatever name is asked for too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (_Missing,), {"package": cls.package})


class _Missing(metaclass=_Kind):
    """Something of a missing package."""

    package = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ModuleNotFoundError(f"{self.package} is not installed here")


def _plain(function: Any = None, *_: Any, **__: Any) -> Any:
    """In the place of numba's decorators."""
    return function if callable(function) else _plain


MISSING = make_do()
