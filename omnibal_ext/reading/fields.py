"""Objects of a file with many fields, of which a program reads a few: each is checked when it is read."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omnibal_ext.reading.checks import Check, maybe


class Fields(Mapping[str, Any]):
    """The fields of a JSON object; `where`: its file. Reading one raises UserError if its check fails; null passes.

    A field that has no check cannot be read: so none is used unchecked.
    """

    def __init__(self, where: Path, values: Mapping[str, Any], checks: Mapping[str, Check[Any]]) -> None:
        self.where, self._values, self._checks = where, values, checks

    def __getitem__(self, name: str) -> Any:
        assert name in self._checks, f"{name} has no check"
        return maybe(self._checks[name])(f"{self.where}: {name}", self._values[name])

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def changed(self, values: Mapping[str, Any]) -> "Fields":
        """Return these fields, some of them replaced or added, with the same checks."""
        return Fields(self.where, {**self._values, **values}, self._checks)
