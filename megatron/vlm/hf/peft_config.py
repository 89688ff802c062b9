"""adapter_config.json of peft's: each field is read, or changes nothing, or is refused by name."""

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
from omnibal_ext.reading.checks import finite, flag, integer, mapping, maybe, record, shown
from omnibal_ext.reading.document import read_json

PREFIX = "base_model.model."
ENDS = (".lora_A.weight", ".lora_B.weight")
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
NUMBERS = (*NEEDED, *OPTIONAL)
"""The fields that are read."""
Pair = tuple[Tensor, Tensor]
"""A [rank, columns] and B [rows, rank] of a layer."""
MAY_BE: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", "mica"),
    "fan_in_fan_out": (False, True, None),
    "ensure_weight_tying": (False, True, None),
}
"""Fields by whose other values the same numbers mean something else. How adapters begin is over when they are read, but
for ways that change the model's own weights too (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA). peft itself takes back
`fan_in_fan_out` for linear layers, and ties none that have adapters here."""
WITHOUT_EFFECT = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config",
}  # fmt: skip
"""Whatever they say: of whom and what it is, which layers were to have adapters (the names of those that have some say
it), and the particulars of a way that another field has to choose."""
MUST_BE_OFF = {
    "modules_to_save", "megatron_config", "trainable_token_indices", "use_dora", "velora_config",
    "alora_invocation_tokens", "use_qalora", "monteclora_config", "layer_replication", "lora_bias",
    "target_parameters", "use_bdlora", "arrow_config", "kasa_config",
}  # fmt: skip
"""What is more than two matrices beside a layer, or another product of them."""
NAME = re.compile(r"\^?([\w.]|\\\.)+\$?")
"""The regular expressions among the names of patterns that are read: those that say what layers are called."""


@dataclass(frozen=True)
class PeftConfig:
    """What a folder's adapter_config.json says, all of which can be honoured."""

    path: Path
    fields: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        """Raises UserError naming the field that is no field of peft's, or by which adapters are of another kind."""
        path = folder / ADAPTER
        fields = read_json(path, record(NEEDED, OPTIONAL), REMEDY)
        for name, value in fields.items():
            if name in (*NUMBERS, *WITHOUT_EFFECT) or (name in MAY_BE and value in MAY_BE[name]):
                continue
            if name in MAY_BE:
                known = ", ".join(repr(one) for one in MAY_BE[name] if one is not None)
                raise UserError(f"{path}: {name} is {shown(value)}; supported: {known}; else {MERGE}")
            if value and name in MUST_BE_OFF:
                raise UserError(f"{path}: {name} is {shown(value)}; plain LoRA alone is read here: {MERGE}")
            if value:
                unknown = name if name.isidentifier() else shown(name)
                raise UserError(f"{path}: {unknown} is {shown(value)}, which is not known here; {MERGE}")
        for pattern in ("rank_pattern", "alpha_pattern"):
            for name in fields.get(pattern) or {}:
                if not NAME.fullmatch(name):
                    raise UserError(f"{path}: {pattern} has {shown(name)}; names of layers are read here: {MERGE}")
        return cls(path, fields)

    @property
    def rank(self) -> int:
        """Of layers that have none of their own."""
        return int(self.fields["r"])

    @property
    def is_stabilized(self) -> bool:
        """Scales are alpha over the root of the rank (rsLoRA, arXiv 2312.03732)."""
        return bool(self.fields.get("use_rslora"))

    def scale(self, rank: int, alpha: float) -> float:
        """What the product of a layer's adapters is multiplied with."""
        return alpha / (math.sqrt(rank) if self.is_stabilized else rank)

    @property
    def alpha(self) -> float:
        """That of plain adapters of the same rank and scale."""
        alpha = float(self.fields["lora_alpha"])
        return alpha * math.sqrt(self.rank) if self.is_stabilized else alpha

    def check_layer(self, layer: str, rank: int) -> None:
        """Raise UserError unless a layer, by its name in peft's file, has the rank said of it and the scale of all."""
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
        """What a pattern says of a layer: the first that its name ends with, as in peft."""
        found = (v for n, v in (self.fields.get(pattern) or {}).items() if re.match(rf"(.*\.)?({n})$", layer))
        return next(found, of_all)

    @property
    def dropout(self) -> float:
        """Of what enters A, in peft's training."""
        return float(self.fields.get("lora_dropout", 0.0))

    @property
    def notes(self) -> list[str]:
        """What training from here does otherwise than peft would, a line each."""
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
class Kept:
    """What of a peft folder has no place in our checkpoints, and is kept beside the first one for the way back."""

    dropout: float = 0.0
    is_stabilized: bool = False
    idle: Mapping[str, Pair] = field(default_factory=dict)
    """A and B of layers that the model never runs, by their names in peft's file."""

    FIELDS, WEIGHTS = "peft.json", "peft.safetensors"

    def write(self, side: Path) -> None:
        """Into the folder of what a checkpoint came with."""
        fields = {"lora_dropout": self.dropout, "use_rslora": self.is_stabilized}
        (side / self.FIELDS).write_text(json.dumps(fields) + "\n")
        if self.idle:
            write_tensors(side / self.WEIGHTS, self.tensors)

    @classmethod
    def of(cls, *sides: Path) -> "Kept":
        """Of the first of these folders that has some."""
        for side in sides:
            if (side / cls.FIELDS).is_file():
                wanted = record({"lora_dropout": finite(0, 1), "use_rslora": flag})
                fields = read_json(side / cls.FIELDS, wanted, "convert again")
                weights = side / cls.WEIGHTS
                idle = read_pairs(weights) if weights.exists() else {}
                return cls(fields["lora_dropout"], fields["use_rslora"], idle)
        return cls()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """These, as they stand in peft's file."""
        return {
            f"{PREFIX}{name}{end}": one for name, pair in self.idle.items() for end, one in zip(ENDS, pair, strict=True)
        }

    def alpha(self, adapters: Adapters, times: int = 1) -> float:
        """What peft is to be told of a layer with as many times the rank, for the scale of all."""
        if self.is_stabilized:
            return float(f"{adapters.scale * math.sqrt(times * adapters.rank):.12g}")
        return times * adapters.alpha

    def merged(self, name: str, weight: Tensor, scale: float) -> Tensor:
        """An idle weight, by its name in their folder, with its adapters."""
        found = (pair for stem, pair in self.idle.items() if f"{table_name(stem)}.weight" == table_name(name))
        pair = next(found, None)
        return added(weight, *pair, scale) if pair else weight


NOTHING_KEPT = Kept()


def added(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """A weight [rows, columns] and the scaled product of b and a, in fp32 (or better) and rounded once."""
    kind = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(kind) + scale * (b.to(kind) @ a.to(kind))).to(weight.dtype)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file of what is in memory."""
    stored = {name: Stored(path.name, DTYPE_NAMES[one.dtype], tuple(one.shape)) for name, one in tensors.items()}
    write_weights(path, stored, tensors.items())


def read_pairs(file: Path) -> dict[str, Pair]:
    """A and B of each layer, by its name in peft's file. Raises UserError for weights that are neither."""
    weights, found = WeightFolder(file), dict[str, Pair]()
    for name in weights.stored:
        stem = name.removesuffix(ENDS[0]).removesuffix(ENDS[1])
        both = [f"{stem}{end}" for end in ENDS]
        if name not in both:
            raise UserError(f"{file}: {name} is more than the A and B of linear layers: {MERGE}")
        shapes = [weights.stored[one].shape for one in both if one in weights.stored]
        if [len(shape) for shape in shapes] != [2, 2] or shapes[0][0] != shapes[1][1]:
            raise UserError(f"{file}: {name} is not one of an A and a B; {REMEDY}")
        found[stem.removeprefix(PREFIX)] = (weights.tensor(both[0]), weights.tensor(both[1]))
    return found
