"""LoRA adapters: read and written in peft's folder format, and merged into their weights.

adapter_config.json          rank r, alpha, and the names of the layers
adapter_model.safetensors    base_model.model.LAYER.lora_A.weight [r, columns], .lora_B.weight [rows, r]

LAYER is the name of transformers' module. Query, key and value have an A each here. Where they are one matrix there
(InternLM2, InternVL's own ViT), that matrix gets a multiple of the rank: all A stacked, and B zero in the other blocks.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.vlm.hf.finite import Broken
from megatron.vlm.hf.forms import Scope, join, split
from megatron.vlm.hf.names import WeightSource, table_name
from megatron.vlm.hf.peft_config import (
    MERGE,
    PREFIX,
    REMEDY,
    SUFFIXES,
    Pair,
    PeftConfig,
    PeftExtras,
    add_product,
    read_pairs,
    write_tensors,
)
from megatron.vlm.models.adapters import matrix_of_rows, rows_of_matrices, wide
from omnibal_ext.adapters import SUFFIX, Adapters, adapted_matrices
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.folder import ADAPTER
from omnibal_ext.chain import PART_OF, PARTS, layer_names
from omnibal_ext.errors import UserError
from omnibal_ext.families.family import Family
from omnibal_ext.families.registry import family_of
from omnibal_ext.files.records import write_text
from omnibal_ext.modalities.matrix import Matrix

WEIGHT_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class AdaptedLayer:
    """One of our linear layers that can have adapters, and the Hugging Face layers it is made of."""

    name: str
    """Name in our checkpoints, such as links.llm_0.self_attention.linear_qkv."""
    matrix: Matrix
    target: str
    """Part of the model that `Adapters.targets` names."""
    theirs: tuple[str, ...]
    """Names of the Hugging Face layers, in the tables' spelling (`hf/names.py`)."""
    form: str
    scope: Scope

    @property
    def adapter_name(self) -> str:
        """Name of its adapters in our checkpoints."""
        return f"{self.name}{SUFFIX}"

    @property
    def rank_factor(self) -> int:
        """Ratio of the rank of Hugging Face's adapters to that of ours."""
        return self.matrix.fused // len(self.theirs)

    def shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        """Return the full shapes of the LoRA factors a and b, by name in our checkpoints."""
        a, b = (self.matrix.fused * rank, self.matrix.columns), (self.matrix.rows, rank)
        return {f"{self.adapter_name}.a": a, f"{self.adapter_name}.b": b}

    def split(self, a: Tensor, b: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Split our LoRA factors into A and B by Hugging Face layer, without the padding for tensor parallelism."""
        a, b = a[:, : self.matrix.columns], b[: self.matrix.rows]
        b = b if self.rank_factor == 1 else wide(b, self._mask(b))
        both = zip(a.chunk(len(self.theirs)), split(self.form, b, self.scope), strict=True)
        return dict(zip(self.theirs, both, strict=True))

    def join(self, theirs: Mapping[str, tuple[Tensor, Tensor]], rank: int) -> tuple[Tensor, Tensor]:
        """Join A and B by Hugging Face layer to our LoRA factors a and b; layers that are missing are 0. Raises
        UserError for another rank."""
        rows = [len(part) for part in split(self.form, torch.empty(self.matrix.rows, 1, device="meta"), self.scope)]
        pairs = []
        for name, count in zip(self.theirs, rows, strict=True):
            zeros = torch.zeros(rank, self.matrix.columns), torch.zeros(count, rank)
            a, b = theirs.get(name, zeros)
            if (a.shape[1], b.shape[0]) != (self.matrix.columns, count) or a.shape[0] != b.shape[1]:
                raise UserError(
                    f"{name}: its adapters are {list(a.shape)} and {list(b.shape)}, its weight "
                    f"[{count}, {self.matrix.columns}]: of another model"
                )
            if a.shape[0] not in (rank, rank * self.rank_factor):
                raise UserError(f"{name}: has rank {a.shape[0]}, others {rank}; adapters of one rank are read")
            pairs.append((a, b))
        a, b = torch.cat([a for a, _ in pairs]), join(self.form, [b for _, b in pairs], self.scope)
        if b.shape[1] == rank:
            return a.repeat(self.matrix.fused * rank // len(a), 1), b
        own = b.unflatten(1, (self.matrix.fused, rank))[torch.arange(len(b)), matrix_of_rows(self.matrix, len(b), 0)]
        if not torch.equal(wide(own, self._mask(b)), b):
            raise UserError(
                f"{self.theirs[0]}: query, key and value share their A, at {self.rank_factor} times the rank"
            )
        return a, own

    def merged(self, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Return weight [rows, columns] + scale * b a, computed in fp32 or better and rounded once."""
        return add_product(weight, a, wide(b, self._mask(b)), scale)

    def _mask(self, b: Tensor) -> Tensor:
        return rows_of_matrices(self.matrix, len(b), 0).to(b.dtype)


def adapted_layers(architecture: Architecture, sources: Mapping[str, WeightSource]) -> dict[str, AdaptedLayer]:
    """Return every layer that can have adapters, by its weight's name in our checkpoints."""
    matrices, found, family = adapted_matrices(architecture), {}, family_of(architecture)
    names = (name.replace(".", "_") for name in layer_names(architecture.chain))
    kinds = dict(zip(names, zip(architecture.chain, architecture.cost_kinds, strict=True), strict=True))
    for weight, source in sources.items():
        layer, _, inner = weight.removeprefix("links.").removesuffix(".weight").partition(".")
        kind, cost = kinds[layer]
        for matrix in matrices.get(cost, ()):
            if matrix.name == inner and weight.endswith(".weight"):
                theirs = tuple(table_name(name, family).removesuffix(".weight") for name in source.theirs)
                name = weight.removesuffix(".weight")
                found[weight] = AdaptedLayer(name, matrix, PART_OF[kind], theirs, source.form, source.scope)
    return found


def write_peft(
    folder: Path,
    layers: Mapping[str, AdaptedLayer],
    adapters: Adapters,
    ours: Mapping[str, Tensor],
    architecture: Architecture,
    base: str,
    is_remote_code: bool,
    inside: str,
    extras: PeftExtras,
) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained` loads onto the model `base`.

    `ours`: a and b by name in our checkpoints. `is_remote_code`: the model's modules are named as its weights are, as
    code in repositories does. `inside`: `Model.inside` of `base`. `extras`: what the original peft folder had besides.
    """
    tensors, ranks, alphas = dict[str, Tensor](), dict[str, int](), dict[str, float]()
    for layer in layers.values():
        pair = ours[f"{layer.adapter_name}.a"], ours[f"{layer.adapter_name}.b"]
        for theirs, both in layer.split(*pair).items():
            name = theirs if is_remote_code else inside + in_memory(theirs, family_of(architecture).modules)
            tensors |= {f"{PREFIX}{name}{end}": tensor for end, tensor in zip(SUFFIXES, both, strict=True)}
            if layer.rank_factor > 1:
                ranks[name] = layer.rank_factor * adapters.rank
                alphas[name] = extras.alpha(adapters, layer.rank_factor)
    tensors |= extras.tensors
    layer_names = dict.fromkeys(
        name.removeprefix(PREFIX).removesuffix(SUFFIXES[0]) for name in tensors if SUFFIXES[0] in name
    )
    config = {
        "peft_type": "LORA", "base_model_name_or_path": base, "r": adapters.rank,
        "lora_alpha": extras.alpha(adapters), "use_rslora": extras.is_stabilized,
        "lora_dropout": extras.dropout, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "modules_to_save": None, "target_modules": list(layer_names), "rank_pattern": ranks, "alpha_pattern": alphas,
    }  # fmt: skip
    write_text(folder / ADAPTER, json.dumps(config, indent=2) + "\n")
    write_tensors(folder / WEIGHT_FILE, tensors)


def in_memory(name: str, modules: Sequence[tuple[str, str]] = ()) -> str:
    """Convert a name in the families' tables to transformers' module; `modules`: a family's (pattern, replacement)."""
    for pattern, replacement in (*modules, (r"^language_model\.model\.", "language_model.")):
        name = re.sub(pattern, replacement, name)
    return f"model.{name}"


@dataclass(frozen=True)
class PeftAdapters:
    """Content of a peft folder."""

    adapters: Adapters
    ours: dict[str, Tensor]
    """Our a and b, by name in our checkpoints."""
    extras: PeftExtras
    notes: list[str]
    """Lines for the user."""


def read_peft(
    folder: Path,
    layers: Mapping[str, AdaptedLayer],
    architecture: Architecture,
    unused: Mapping[str, Sequence[int]] | None = None,
) -> PeftAdapters:
    """Read a folder that peft saved. `unused`: shapes of weights that the checkpoint has and the model never uses.

    If some layers of a target have adapters, its other layers get zero ones. Raises UserError for a folder that is not
    peft's, and for adapters of another type, model or layer than can be trained here.
    """
    config, found = PeftConfig.read(folder), read_pairs(folder / WEIGHT_FILE)
    broken = Broken()
    for stem, (a, b) in found.items():
        config.check_layer(stem, len(a))
        broken.seen(f"{stem}{SUFFIXES[0]}", a)
        broken.seen(f"{stem}{SUFFIXES[1]}", b)
    broken.refuse(folder / WEIGHT_FILE)
    known = {name: layer for layer in layers.values() for name in layer.theirs}
    family = family_of(architecture)
    unused_pairs = _unused(found, unused or {}, family)
    theirs = {table_name(stem, family): pair for stem, pair in found.items() if stem not in unused_pairs}
    if strange := sorted(theirs.keys() - known.keys()):
        raise UserError(f"{folder}: has adapters of {strange[0]}, which has none here (docs/training.md); {MERGE}")
    if len(theirs) + len(unused_pairs) < len(found):
        raise UserError(f"{folder / WEIGHT_FILE}: has a layer twice, by two names; {REMEDY}")
    targets = {known[name].target for name in theirs}
    if not targets:
        raise UserError(f"{folder}: has no adapters of layers that the model runs; leave it out")
    adapters = Adapters(config.rank, config.alpha, tuple(part for part in PARTS if part in targets))
    ours = dict[str, Tensor]()
    for layer in layers.values():
        if layer.target in targets:
            a, b = layer.join(theirs, adapters.rank)
            ours |= {f"{layer.adapter_name}.a": a, f"{layer.adapter_name}.b": b}
    return PeftAdapters(adapters, ours, PeftExtras(config.dropout, config.is_stabilized, unused_pairs), config.notes)


def _unused(found: Mapping[str, Pair], unused: Mapping[str, Sequence[int]], family: Family) -> dict[str, Pair]:
    """Return a folder's adapters of unused weights. Raises UserError if their shapes do not fit."""
    shapes, kept = {table_name(name, family): list(shape) for name, shape in unused.items()}, {}
    for stem, (a, b) in found.items():
        shape = shapes.get(f"{table_name(stem, family)}.weight")
        if shape not in (None, [len(b), a.shape[1]]):
            raise UserError(
                f"{stem}: its adapters are {list(a.shape)} and {list(b.shape)}, its weight {shape}: of another model"
            )
        if shape:
            kept[stem] = (a, b)
    return kept
