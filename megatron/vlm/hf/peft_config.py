"""peft's adapter_config.json: each field is read, or has no effect here, or is refused by name."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.vlm.hf.folder import DTYPE_NAMES, Stored, WeightFolder, write_weights
from megatron.vlm.hf.names import table_name
from omnibal_ext.adapters import Adapters
from omnibal_ext.architectures.folder import ADAPTER
from omnibal_ext.errors import UserError
from omnibal_ext.families.family import Family
from omnibal_ext.files.records import write_text
from omnibal_ext.reading.checks import finite, flag, integer, mapping, maybe, record, shown
from omnibal_ext.reading.document import read_json

PREFIX = "base_model.model."
SUFFIXES = (".lora_A.weight", ".lora_B.weight")
HALF = re.compile(r"(?P<layer>.+)\.lora_(?P<half>[AB])(\.\w+)?\.weight")
"""Pattern of an A or B; the adapter's name, which peft leaves out of files, stands in those that others save."""
REMEDY = "give a folder that peft saved"
MERGE = "merge it with peft (merge_and_unload), and give the merged model alone"
LARGEST_RANK = 2**16
NEEDED = {"r": integer(1, LARGEST_RANK), "lora_alpha": finite(1e-30)}
OPTIONAL = {
    "use_rslora": maybe(flag),
    "lora_dropout": finite(0, 1),
    "rank_pattern": maybe(mapping(integer(1, LARGEST_RANK))),
    "alpha_pattern": maybe(mapping(finite(1e-30))),
}
Pair = tuple[Tensor, Tensor]
"""A [rank, columns] and B [rows, rank] of a layer."""
ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", "mica"),
    "fan_in_fan_out": (False, True, None),
    "ensure_weight_tying": (False, True, None),
}
"""Field -> supported values; under others the same tensors mean another model. Initialisations that also change the
base weights (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) are not supported. peft ignores `fan_in_fan_out` for linear layers,
and ties none of the layers that have adapters here."""
IGNORED_FIELDS = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
}  # fmt: skip
"""Fields of which any value is accepted: metadata, the choice of layers (the tensors' names say which have adapters),
and settings of methods that another field would have to switch on."""
NAME = re.compile(r"\^?([\w.]|\\\.)+\$?")
"""Pattern of keys of rank_pattern and alpha_pattern that are read: layer names, no other regular expressions."""


@dataclass(frozen=True)
class PeftConfig:
    """adapter_config.json of a folder, of which every field is supported."""

    path: Path
    fields: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        """Read a folder's configuration. Raises UserError naming a field that is unknown, or a value that is
        unsupported."""
        path = folder / ADAPTER
        fields = read_json(path, record(NEEDED, OPTIONAL), REMEDY)
        known = {*NEEDED, *OPTIONAL, *ALLOWED_VALUES, *IGNORED_FIELDS}
        for name, value in fields.items():
            if name in ALLOWED_VALUES and value not in (allowed := ALLOWED_VALUES[name]):
                supported = ", ".join(repr(one) for one in allowed if one is not None)
                raise UserError(f"{path}: {name} is {shown(value)}; supported: {supported}; else {MERGE}")
            if value and name not in known:  # more tensors than A and B of a layer, or another product of them
                unread = name if name.isidentifier() else shown(name)
                raise UserError(f"{path}: {unread} is {shown(value)}; plain LoRA alone is read here: {MERGE}")
        for pattern in ("rank_pattern", "alpha_pattern"):
            for name in fields.get(pattern) or {}:
                if not NAME.fullmatch(name):
                    raise UserError(f"{path}: {pattern} has {shown(name)}; names of layers are read here: {MERGE}")
        return cls(path, fields)

    @property
    def rank(self) -> int:
        """Rank of layers that are not in rank_pattern."""
        return int(self.fields["r"])

    @property
    def is_stabilized(self) -> bool:
        """Whether it is rsLoRA: the scale is alpha / sqrt(rank) (arXiv 2312.03732)."""
        return bool(self.fields.get("use_rslora"))

    def scale(self, rank: int, alpha: float) -> float:
        """Return the factor of B A in the adapted product: alpha / rank, with rsLoRA alpha / sqrt(rank)."""
        return alpha / (math.sqrt(rank) if self.is_stabilized else rank)

    @property
    def alpha(self) -> float:
        """Alpha with which plain LoRA has the same scale."""
        alpha = float(self.fields["lora_alpha"])
        return alpha * math.sqrt(self.rank) if self.is_stabilized else alpha

    def check_layer(self, layer: str, rank: int) -> None:
        """Raise UserError unless a layer (its name in peft's file) has the configured rank and the common scale."""
        if rank != (said := self._of("rank_pattern", layer, self.rank)):
            raise UserError(f"{self.path}: {layer} has rank {rank}, r or rank_pattern says {said}; {REMEDY}")
        of_all = self.fields["lora_alpha"]
        found, of_all = self.scale(rank, self._of("alpha_pattern", layer, of_all)), self.scale(self.rank, of_all)
        if not math.isclose(found, of_all, rel_tol=1e-12):
            raise UserError(
                f"{self.path}: rank_pattern and alpha_pattern scale {layer} by {found:g}, r and lora_alpha by "
                f"{of_all:g}; one scale for all is read here: {MERGE}"
            )

    def _of(self, pattern: str, layer: str, of_all: Any) -> Any:
        """Return the value of a pattern for a layer, by peft's rule: the first key that its name ends with."""
        found = (v for n, v in (self.fields.get(pattern) or {}).items() if re.match(rf"(.*\.)?({n})$", layer))
        return next(found, of_all)

    @property
    def dropout(self) -> float:
        """Value of lora_dropout."""
        return float(self.fields.get("lora_dropout", 0.0))

    @property
    def notes(self) -> list[str]:
        """Differences of training here from peft's, a line each."""
        found = list[str]()
        if self.dropout:
            found.append(
                f"note: {self.path}: lora_dropout is {self.dropout}; adapters have no dropout here, and train without; "
                "--to-peft writes it back"
            )
        if self.fields.get("init_lora_weights") == "mica":
            found.append(
                f"note: {self.path}: init_lora_weights is 'mica', which trains A alone; here A and B are trained"
            )
        return found


@dataclass(frozen=True)
class PeftExtras:
    """Fields and weights of a peft folder that our checkpoints lack; kept in their `huggingface/` for the export."""

    dropout: float = 0.0
    is_stabilized: bool = False
    unused: Mapping[str, Pair] = field(default_factory=dict)
    """A and B of layers that the model never runs, by name in peft's file."""

    FIELDS, WEIGHTS = "peft.json", "peft.safetensors"

    def write(self, side: Path) -> None:
        """Write peft.json, and peft.safetensors of any unused weights, to `side`, a checkpoint's `huggingface/`."""
        fields = {"lora_dropout": self.dropout, "use_rslora": self.is_stabilized}
        write_text(side / self.FIELDS, json.dumps(fields) + "\n")
        if self.unused:
            write_tensors(side / self.WEIGHTS, self.tensors)

    @classmethod
    def of(cls, *sides: Path) -> "PeftExtras":
        """Read the extras from the first of these folders that has a file of them; empty if none has."""
        for side in sides:
            if (side / cls.FIELDS).is_file():
                wanted = record({"lora_dropout": finite(0, 1), "use_rslora": flag})
                fields = read_json(side / cls.FIELDS, wanted, "convert again")
                weights = side / cls.WEIGHTS
                unused = read_pairs(weights) if weights.exists() else {}
                return cls(fields["lora_dropout"], fields["use_rslora"], unused)
        return cls()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """A and B in `unused` by their names in peft's file."""
        return {
            f"{PREFIX}{name}{end}": one
            for name, pair in self.unused.items()
            for end, one in zip(SUFFIXES, pair, strict=True)
        }

    def alpha(self, adapters: Adapters, times: int = 1) -> float:
        """Return the lora_alpha of a layer of `times` the rank that gives the common scale."""
        if self.is_stabilized:
            return float(f"{adapters.scale * math.sqrt(times * adapters.rank):.12g}")
        return times * adapters.alpha

    def merged(self, name: str, weight: Tensor, scale: float, family: Family) -> Tensor:
        """Return an unused weight (`name` is Hugging Face's) of a model of `family`, its adapters merged if it has
        some."""
        wanted = table_name(name, family)
        pair = next(
            (pair for stem, pair in self.unused.items() if f"{table_name(stem, family)}.weight" == wanted), None
        )
        return add_product(weight, *pair, scale) if pair else weight


def add_product(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return weight [rows, columns] + scale * b a, computed in fp32 or better and rounded once."""
    kind = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(kind) + scale * (b.to(kind) @ a.to(kind))).to(weight.dtype)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as one safetensors file."""
    stored = {name: Stored(path.name, DTYPE_NAMES[one.dtype], tuple(one.shape)) for name, one in tensors.items()}
    write_weights(path, stored, tensors.items())


def read_pairs(file: Path) -> dict[str, Pair]:
    """Read LoRA's A and B by layer name in peft's file. Raises UserError for any other tensor."""
    if not file.exists() and (pickled := file.with_suffix(".bin")).exists():
        raise UserError(f"{pickled}: is a pickle, which may run code and is not read; load and save it with peft")
    weights, halves = WeightFolder(file), dict[str, dict[str, str]]()
    for name in weights.stored:
        if not (half := HALF.fullmatch(name)):
            raise UserError(f"{file}: {name} is more than the A and B of linear layers: {MERGE}")
        layer = halves.setdefault(half["layer"].removeprefix(PREFIX), {})
        if half["half"] in layer:
            raise UserError(f"{file}: has {layer[half['half']]} and {name}; give a folder of one adapter")
        layer[half["half"]] = name
    for both in halves.values():
        shapes = [weights.stored[both[half]].shape for half in "AB" if half in both]
        if [len(shape) for shape in shapes] != [2, 2] or shapes[0][0] != shapes[1][1]:
            raise UserError(f"{file}: {next(iter(both.values()))} is not one of an A and a B; {REMEDY}")
    return {layer: (weights.tensor(both["A"]), weights.tensor(both["B"])) for layer, both in halves.items()}
