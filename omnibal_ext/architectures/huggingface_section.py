"""One object of a config.json: its fields over its model type's defaults, and none of them overlooked."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from omnibal_ext.architectures.huggingface_defaults import DEFAULTS, WITHOUT_EFFECT
from omnibal_ext.errors import UserError


@dataclass(frozen=True)
class Section:
    """One object of a config.json over its model type's defaults; `where` names it in messages.

    It knows what it was asked for: a field that was given and not asked for is one that we would not obey.
    """

    where: str
    values: Mapping[str, Any]
    asked: set[str] = field(default_factory=set)

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        if name not in self.values:
            raise UserError(f"{self.where}.{name} is missing")
        return self.values[name]

    def get(self, name: str) -> Any:
        """A field, None where there is none."""
        self.asked.add(name)
        return self.values.get(name)

    def inner(self, name: str, default_type: str) -> "Section":
        """The section of that name, of `default_type` where it does not say."""
        values = self.get(name) or {}
        kind = values.get("model_type") or default_type
        kind = "internlm2" if "InternLM2ForCausalLM" in (values.get("architectures") or ()) else kind
        return section(f"{self.where}.{name}", kind, values)

    def choose(self, name: str, known: Mapping[Any, Any]) -> Any:
        """What a field's value stands for. Raises UserError if it is none of the known."""
        value = self[name]
        if value not in known:
            raise UserError(f"{self.where}.{name} is {value!r}; supported: {', '.join(map(repr, known))}")
        return known[value]

    def must(self, **wanted: Any) -> None:
        """Refuse fields that are given and differ, with UserError."""
        for name, value in wanted.items():
            self.asked.add(name)
            if self.values.get(name, value) != value:
                raise UserError(f"{self.where}.{name} is {self.values[name]!r}; supported: {value!r}")

    def refuse_unread(self) -> None:
        """Refuse fields that are given, not turned off, and nobody asked for, with UserError."""
        for name, value in self.values.items():
            if value and name not in self.asked | WITHOUT_EFFECT[self.values["model_type"]]:
                raise UserError(
                    f"{self.where}.{name} is {str(value)[:60]!r}, which is not known here; "
                    "remove it from the file if the model computes the same without it"
                )


def section(where: str, kind: str, values: Mapping[str, Any]) -> Section:
    """An object of a config.json as the model type `kind`. Raises UserError if that is not known."""
    if kind not in DEFAULTS:
        raise UserError(f"{where}: model type {kind!r} is not supported; known: {', '.join(DEFAULTS)}")
    return Section(where, {**DEFAULTS[kind], **values, "model_type": kind})
