"""An object of a config.json: its fields over its model type's defaults; a field that nothing reads is a fault."""

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
class ModelType:
    """What a `model_type` stands for: defaults of its config, and names of its weights in files."""

    defaults: Mapping[str, Any]
    """Defaults of transformers' config class, or of the model's own code."""
    without_effect: frozenset[str]
    """Fields that do not affect training; all others are read, or refused."""
    weights: tuple[Weight, ...] = ()
    """Weights of a language model; of a whole model, all but the language model's."""
    weights_apart: tuple[Weight, ...] = ()
    """Weights where each expert has tensors of its own; (): they are always stored one way."""


@dataclass(frozen=True)
class Section:
    """One object of a config.json over its model type's defaults; `where` names it in messages.

    It notes which fields were read (`asked`): one that is given and never read would be ignored. `faults`: what is
    wrong so far, in sections inside too, and does not prevent reading on.
    """

    where: str
    values: Mapping[str, Any]
    model_type: ModelType
    inner_types: Mapping[str, ModelType]
    """Model types of inner_types sections."""
    faults: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    folder: Path | None = None
    """Folder of a whole model's config.json; None: a preset, which has no files."""

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        if name not in self.values:
            raise UserError(f"{self.where}.{name} is missing")
        return self.values[name]

    def get(self, name: str) -> Any:
        """Return a field's value, unchecked, and note it as read; None: absent."""
        self.asked.add(name)
        return self.values.get(name)

    def take(self, name: str, check: Check[Any] | None = None) -> Any:
        """Return a field's value. Raises UserError if it is absent, or fails `check` (default: in `CHECKS`)."""
        return (check or CHECKS[name])(f"{self.where}.{name}", self[name])

    def take_if(self, name: str, check: Check[Any] | None = None) -> Any:
        """Return what `take` does, or None if the field is absent or null."""
        return maybe(check or CHECKS[name])(f"{self.where}.{name}", self.get(name))

    def inner(self, name: str, default_type: str, always: bool = False) -> "Section":
        """Return the object in a field as a section, of `default_type` if `always` or it has none of its own."""
        values = self.take_if(name, mapping(any_value)) or {}
        always = always or (
            values.get("model_type") == self["model_type"] and default_type.startswith(self["model_type"])
        )
        kind = default_type if always else part_type(f"{self.where}.{name}", values, default_type)
        return self.section_of(name, kind, values)

    def towers(self, vision: str, *languages: str) -> "tuple[Section, Section]":
        """Return the sections of the ViT and of the language model. Raises UserError if they are of other types."""
        tower, language = self.inner("vision_config", vision), self.inner("text_config", languages[0])
        tower.must_be(vision)
        language.must_be(*languages)
        return tower, language

    def section_of(self, name: str, kind: Any, values: Mapping[str, Any]) -> "Section":
        """Return `values` as the section `name` of type `kind`, wherever they are in the file. May raise UserError."""
        self.asked.add(name)
        return _of_type(f"{self.where}.{name}", kind, self.inner_types, self.inner_types, values, self.faults)

    def read_as(self, kind: str, values: Mapping[str, Any], faults: list[str]) -> "Section":
        """Return this object again with other type, fields and list of faults."""
        return _of_type(self.where, kind, self.inner_types, self.inner_types, values, faults)

    def choose(self, name: str, known: Mapping[str, Any]) -> Any:
        """Return `known[value]` for a field's value. Raises UserError if that is not in `known`."""
        value = self[name]
        if not isinstance(value, str) or value not in known:
            raise UserError(f"{self.where}.{name} is {shown(value)}; supported: {', '.join(map(repr, known))}")
        return known[value]

    def must(self, **wanted: Any) -> None:
        """Note a fault for each of these fields that config.json has with another value; they count as read."""
        for name, value in wanted.items():
            self.asked.add(name)
            if self.values.get(name, value) != value:
                self.faults.append(f"{self.where}.{name} is {shown(self.values[name])}; supported: {value!r}")

    def must_be(self, *kinds: str) -> None:
        """Raise UserError unless the section is of one of these model types."""
        if self["model_type"] not in kinds:
            known = " or ".join(map(repr, kinds))
            raise UserError(f"{self.where}.model_type is {shown(self['model_type'])}; supported: {known}")

    def refuse_unread(self) -> None:
        """Note a fault for each field that was never read, unless it has no effect or is empty (null, false, 0, "")."""
        read = self.asked | self.model_type.without_effect
        for name, value in self.values.items():
            if value and name not in read:
                field = name if name.isidentifier() else shown(name)
                self.faults.append(
                    f"{self.where}.{field} is {str(value)[:60]!r}, which is not known here; "
                    "remove it from the file if the model computes the same without it"
                )


def part_type(where: str, values: Mapping[str, Any], default_type: str) -> Any:
    """Return a section's model type, "internlm2" by its class in `architectures`. Raises UserError if that is no list
    of names."""
    architectures = maybe(listing(text))(f"{where}.architectures", values.get("architectures")) or ()
    return "internlm2" if "InternLM2ForCausalLM" in architectures else values.get("model_type") or default_type


def whole_model(
    where: str,
    values: Mapping[str, Any],
    models: Mapping[str, ModelType],
    inner_types: Mapping[str, ModelType],
    folder: Path | None,
) -> Section:
    """Return an entire config.json as a section. Raises UserError if its model type is none of `models`."""
    others = "; docs/families.md says what others need"
    found = _of_type(where, values.get("model_type", ""), models, inner_types, values, [], others)
    return replace(found, folder=folder)


def _of_type(
    where: str,
    kind: Any,
    known: Mapping[str, ModelType],
    inner_types: Mapping[str, ModelType],
    values: Mapping[str, Any],
    faults: list[str],
    others: str = "",
) -> Section:
    if kind not in tuple(known):  # which may be anything, not a name alone
        raise UserError(f"{where}: model type {shown(kind)} is not supported; known: {', '.join(known)}{others}")
    if values.get("quantization_config"):
        given = values["quantization_config"]
        method = given.get("quant_method", "of an unknown method") if isinstance(given, Mapping) else given
        raise UserError(
            f"{where}: the weights are quantised ({shown(method)}), which cannot be trained; give the folder of the "
            "model that they were made of, in bfloat16 or float32"
        )
    model_type = known[kind]
    return Section(where, {**model_type.defaults, **values, "model_type": kind}, model_type, inner_types, faults)
