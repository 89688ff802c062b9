"""One object of a config.json: its fields over its model type's defaults, and none of them overlooked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.families.fields import CHECKS
from omnibal_ext.families.weights import Weight
from omnibal_ext.reading.checks import Check, listing, mapping, maybe, shown, text
from omnibal_ext.reading.checks import anything as any_value


@dataclass(frozen=True)
class Part:
    """What a model type means in a config.json: where the file is silent, and by which names its weights go."""

    defaults: Mapping[str, Any]
    """Of transformers, or of the model's own code."""
    without_effect: frozenset[str]
    """Fields that say nothing about training; all others are read, or refused."""
    weights: tuple[Weight, ...] = ()
    """Of a language model; of a whole model those of all the rest."""
    weights_apart: tuple[Weight, ...] = ()
    """Of a language model whose experts lie together as published, and may lie apart; () where they lie one way."""


@dataclass(frozen=True)
class Section:
    """One object of a config.json over its model type's defaults; `where` names it in messages.

    It knows what it was asked for: a field that was given and not asked for is one that we would not obey. Faults that
    do not hinder reading on are noted down, together with those of the sections inside.
    """

    where: str
    values: Mapping[str, Any]
    part: Part
    parts: Mapping[str, Part]
    """What sections inside may be, by model type."""
    faults: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    folder: Path | None = None
    """Of the file, where it is a whole model's; None: a preset, without files."""

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        if name not in self.values:
            raise UserError(f"{self.where}.{name} is missing")
        return self.values[name]

    def get(self, name: str) -> Any:
        """A field, None where there is none."""
        self.asked.add(name)
        return self.values.get(name)

    def take(self, name: str, check: Check[Any] | None = None) -> Any:
        """A field that must be there and be as the check says, else that of `CHECKS`, with UserError."""
        return (check or CHECKS[name])(f"{self.where}.{name}", self[name])

    def take_if(self, name: str, check: Check[Any] | None = None) -> Any:
        """A field that may be absent or null."""
        return maybe(check or CHECKS[name])(f"{self.where}.{name}", self.get(name))

    def inner(self, name: str, default_type: str, always: bool = False) -> "Section":
        """The section of that name, of `default_type` where it does not say, or `always`."""
        values = self.take_if(name, mapping(any_value)) or {}
        kind = default_type if always else part_type(f"{self.where}.{name}", values, default_type)
        return self.section_of(name, kind, values)

    def towers(self, vision: str, *languages: str) -> "tuple[Section, Section]":
        """The sections of the ViT and of the language model. Raises UserError for other types than these."""
        tower, language = self.inner("vision_config", vision), self.inner("text_config", languages[0])
        tower.must_be(vision)
        language.must_be(*languages)
        return tower, language

    def section_of(self, name: str, kind: Any, values: Mapping[str, Any]) -> "Section":
        """A section of that name and type with these fields, wherever in the file they stand."""
        self.asked.add(name)
        return _of_type(f"{self.where}.{name}", kind, self.parts, self.parts, values, self.faults)

    def read_as(self, kind: str, values: Mapping[str, Any], faults: list[str]) -> "Section":
        """The same object as a section of that type with these fields; its faults are noted apart."""
        return _of_type(self.where, kind, self.parts, self.parts, values, faults)

    def choose(self, name: str, known: Mapping[str, Any]) -> Any:
        """What a field's value stands for. Raises UserError if it is none of the known."""
        value = self[name]
        if not isinstance(value, str) or value not in known:
            raise UserError(f"{self.where}.{name} is {shown(value)}; supported: {', '.join(map(repr, known))}")
        return known[value]

    def must(self, **wanted: Any) -> None:
        """Fields that are given and differ are faults."""
        for name, value in wanted.items():
            self.asked.add(name)
            if self.values.get(name, value) != value:
                self.faults.append(f"{self.where}.{name} is {shown(self.values[name])}; supported: {value!r}")

    def must_be(self, *kinds: str) -> None:
        """Raises UserError if the section is of another model type, with other fields."""
        if self["model_type"] not in kinds:
            known = " or ".join(map(repr, kinds))
            raise UserError(f"{self.where}.model_type is {shown(self['model_type'])}; supported: {known}")

    def refuse_unread(self) -> None:
        """Fields that are given, not turned off, and nobody asked for are faults."""
        read = self.asked | self.part.without_effect
        for name, value in self.values.items():
            if value and name not in read:
                field = name if name.isidentifier() else shown(name)
                self.faults.append(
                    f"{self.where}.{field} is {str(value)[:60]!r}, which is not known here; "
                    "remove it from the file if the model computes the same without it"
                )


def part_type(where: str, values: Mapping[str, Any], default_type: str) -> Any:
    """The model type of a part; InternLM2's own files do not say it. Raises UserError for architectures of no names."""
    architectures = maybe(listing(text))(f"{where}.architectures", values.get("architectures")) or ()
    return "internlm2" if "InternLM2ForCausalLM" in architectures else values.get("model_type") or default_type


def whole_model(
    where: str, values: Mapping[str, Any], models: Mapping[str, Part], parts: Mapping[str, Part], folder: Path | None
) -> Section:
    """All of a config.json. Raises UserError if its model type is none of `models`."""
    others = "; docs/families.md says what others need"
    return replace(_of_type(where, values.get("model_type", ""), models, parts, values, [], others), folder=folder)


def _of_type(
    where: str, kind: Any, known: Mapping[str, Part], parts: Mapping[str, Part], values: Mapping[str, Any],
    faults: list[str], others: str = "",
) -> Section:  # fmt: skip
    if kind not in tuple(known):  # which may be anything, not a name alone
        raise UserError(f"{where}: model type {shown(kind)} is not supported; known: {', '.join(known)}{others}")
    if values.get("quantization_config"):
        given = values["quantization_config"]
        method = given.get("quant_method", "of an unknown method") if isinstance(given, Mapping) else given
        raise UserError(
            f"{where}: the weights are quantised ({shown(method)}), which cannot be trained; give the folder of the "
            "model that they were made of, in bfloat16 or float32"
        )
    part = known[kind]
    return Section(where, {**part.defaults, **values, "model_type": kind}, part, parts, faults)
