"""Adapters in peft's folder format, in and out; and merged into the weights that they stand beside.

adapter_config.json          rank r, alpha, and the names of the layers
adapter_model.safetensors    base_model.model.LAYER.lora_A.weight [r, columns], .lora_B.weight [rows, r]

LAYER is what transformers calls a layer in memory. Where theirs is one matrix and ours has several A (query, key and
value of InternLM2 and of InternVL's own ViT), it has as many times the rank: all A below each other, and B with zeros
where a row is of another.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.vlm.hf.forms import join, split
from megatron.vlm.hf.names import Source, table_name
from megatron.vlm.hf.peft_config import (
    ENDS,
    MERGE,
    NOTHING_KEPT,
    PREFIX,
    REMEDY,
    Kept,
    Pair,
    PeftConfig,
    added,
    read_pairs,
    write_tensors,
)
from megatron.vlm.models.adapters import part_of_rows, rows_and_parts, wide
from omnibal_ext.adapters import SUFFIX, Adapters, adapted_matrices
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.folder import ADAPTER
from omnibal_ext.chain import PART_OF, PARTS, layer_names
from omnibal_ext.errors import UserError
from omnibal_ext.families.registry import family_of
from omnibal_ext.matrices import Matrix

WEIGHT_FILE = "adapter_model.safetensors"


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer of ours with adapters, and what it is at Hugging Face's."""

    name: str
    """As in our checkpoints, such as links.llm_0.self_attention.linear_qkv."""
    matrix: Matrix
    part: str
    theirs: tuple[str, ...]
    """The layers that it is made of, as in the tables of `names`."""
    form: str

    @property
    def beside(self) -> str:
        """The name of its adapters in our checkpoints."""
        return f"{self.name}{SUFFIX}"

    @property
    def times(self) -> int:
        """The rank of theirs over that of ours."""
        return self.matrix.parts // len(self.theirs)

    def shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        """Of its adapters, whole, by name in our checkpoints."""
        a, b = (self.matrix.parts * rank, self.matrix.columns), (self.matrix.rows, rank)
        return {f"{self.beside}.a": a, f"{self.beside}.b": b}

    def split(self, a: Tensor, b: Tensor, architecture: Architecture) -> dict[str, tuple[Tensor, Tensor]]:
        """A and B of each of theirs by name, of ours; rows and columns that fill up ranks are left out."""
        a, b = a[:, : self.matrix.columns], b[: self.matrix.rows]
        b = b if self.times == 1 else wide(b, self._mask(b))
        both = zip(a.chunk(len(self.theirs)), split(self.form, b, architecture), strict=True)
        return dict(zip(self.theirs, both, strict=True))

    def join(
        self, theirs: Mapping[str, tuple[Tensor, Tensor]], rank: int, architecture: Architecture
    ) -> tuple[Tensor, Tensor]:
        """Our a and b, of A and B of theirs by name; zero where there is none. Raises UserError for other ranks."""
        rows = [len(part) for part in split(self.form, torch.empty(self.matrix.rows, 1, device="meta"), architecture)]
        pairs = []
        for name, count in zip(self.theirs, rows, strict=True):
            zeros = torch.zeros(rank, self.matrix.columns), torch.zeros(count, rank)
            a, b = theirs.get(name, zeros)
            if (a.shape[1], b.shape[0]) != (self.matrix.columns, count) or a.shape[0] != b.shape[1]:
                raise UserError(
                    f"{name}: its adapters are {list(a.shape)} and {list(b.shape)}, its weight "
                    f"[{count}, {self.matrix.columns}]: of another model"
                )
            if a.shape[0] not in (rank, rank * self.times):
                raise UserError(f"{name}: has rank {a.shape[0]}, others {rank}; adapters of one rank are read")
            pairs.append((a, b))
        a, b = torch.cat([a for a, _ in pairs]), join(self.form, [b for _, b in pairs], architecture)
        if b.shape[1] == rank:
            return a.repeat(self.matrix.parts * rank // len(a), 1), b
        own = b.unflatten(1, (self.matrix.parts, rank))[torch.arange(len(b)), part_of_rows(self.matrix, len(b), 0)]
        if not torch.equal(wide(own, self._mask(b)), b):
            raise UserError(f"{self.theirs[0]}: query, key and value share their A, at {self.times} times the rank")
        return a, own

    def merged(self, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        """Our weight [rows, columns] with its adapters' product added, in fp32 (or better) and rounded once."""
        return added(weight, a, wide(b, self._mask(b)), scale)

    def _mask(self, b: Tensor) -> Tensor:
        return rows_and_parts(self.matrix, len(b), 0).to(b.dtype)


def adapted_layers(architecture: Architecture, sources: Mapping[str, Source]) -> dict[str, AdaptedLayer]:
    """Every layer that can have adapters, by the name of its weight in our checkpoints."""
    matrices, found = adapted_matrices(architecture), {}
    names = (name.replace(".", "_") for name in layer_names(architecture.chain))
    kinds = dict(zip(names, zip(architecture.chain, architecture.cost_kinds, strict=True), strict=True))
    for weight, source in sources.items():
        link, _, inner = weight.removeprefix("links.").removesuffix(".weight").partition(".")
        kind, cost = kinds[link]
        for matrix in matrices.get(cost, matrices.get(kind, ())):
            if matrix.name == inner and weight.endswith(".weight"):
                theirs = tuple(table_name(name).removesuffix(".weight") for name in source.theirs)
                name = weight.removesuffix(".weight")
                found[weight] = AdaptedLayer(name, matrix, PART_OF[kind], theirs, source.form)
    return found


def write_peft(
    folder: Path,
    layers: Mapping[str, AdaptedLayer],
    adapters: Adapters,
    ours: Mapping[str, Tensor],
    architecture: Architecture,
    base: str,
    in_repository: bool,
    kept: Kept = NOTHING_KEPT,
) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained` loads onto the model `base`.

    ours: a and b by name in our checkpoints. in_repository: the model's code is in its repository, where layers are
    called in memory as on disk. kept: what goes back as it came.
    """
    tensors, ranks, alphas = dict[str, Tensor](), dict[str, int](), dict[str, float]()
    for layer in layers.values():
        pair = ours[f"{layer.beside}.a"], ours[f"{layer.beside}.b"]
        for theirs, both in layer.split(*pair, architecture).items():
            name = theirs if in_repository else in_memory(theirs, family_of(architecture).modules)
            tensors |= {f"{PREFIX}{name}{end}": tensor for end, tensor in zip(ENDS, both, strict=True)}
            if layer.times > 1:
                ranks[name] = layer.times * adapters.rank
                alphas[name] = kept.alpha(adapters, layer.times)
    tensors |= kept.tensors
    layer_names = dict.fromkeys(name.removeprefix(PREFIX).removesuffix(ENDS[0]) for name in tensors if ENDS[0] in name)
    config = {
        "peft_type": "LORA", "base_model_name_or_path": base, "r": adapters.rank,
        "lora_alpha": kept.alpha(adapters), "use_rslora": kept.is_stabilized,
        "lora_dropout": kept.dropout, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "modules_to_save": None, "target_modules": list(layer_names), "rank_pattern": ranks, "alpha_pattern": alphas,
    }  # fmt: skip
    (folder / ADAPTER).write_text(json.dumps(config, indent=2) + "\n")
    write_tensors(folder / WEIGHT_FILE, tensors)


def in_memory(name: str, modules: Sequence[tuple[str, str]] = ()) -> str:
    """What transformers calls a layer in memory, of its name in the tables; `modules` are its family's own."""
    for pattern, replacement in (*modules, (r"^language_model\.model\.", "language_model.")):
        name = re.sub(pattern, replacement, name)
    return f"model.{name}"


@dataclass(frozen=True)
class PeftAdapters:
    """What a folder of peft's holds."""

    adapters: Adapters
    ours: dict[str, Tensor]
    """a and b by name in our checkpoints."""
    kept: Kept
    notes: list[str]
    """What is to be said of it, a line each."""


def read_peft(
    folder: Path,
    layers: Mapping[str, AdaptedLayer],
    architecture: Architecture,
    idle: Mapping[str, Sequence[int]] | None = None,
) -> PeftAdapters:
    """The adapters of a folder that peft saved. `idle`: shapes of the model's weights that it never uses, by name.

    Layers of a part of which others have adapters, and themselves none, get zeros, which training leaves as they are.
    Raises UserError for what is no folder of peft's, and adapters that are of another kind, model or layers than ours.
    """
    config, found = PeftConfig.read(folder), read_pairs(folder / WEIGHT_FILE)
    for stem, (a, _) in found.items():
        config.check_layer(stem, len(a))
    known = {name: layer for layer in layers.values() for name in layer.theirs}
    aside = _idle(found, idle or {})
    theirs = {table_name(stem): pair for stem, pair in found.items() if stem not in aside}
    if strange := sorted(theirs.keys() - known.keys()):
        raise UserError(f"{folder}: has adapters of {strange[0]}, which has none here (docs/training.md); {MERGE}")
    if len(theirs) + len(aside) < len(found):
        raise UserError(f"{folder / WEIGHT_FILE}: has a layer twice, by two names; {REMEDY}")
    parts = {known[name].part for name in theirs}
    if not parts:
        raise UserError(f"{folder}: has no adapters of layers that the model runs; leave it out")
    adapters = Adapters(config.rank, config.alpha, tuple(part for part in PARTS if part in parts))
    ours = dict[str, Tensor]()
    for layer in layers.values():
        if layer.part in parts:
            a, b = layer.join(theirs, adapters.rank, architecture)
            ours |= {f"{layer.beside}.a": a, f"{layer.beside}.b": b}
    return PeftAdapters(adapters, ours, Kept(config.dropout, config.is_stabilized, aside), config.notes)


def _idle(found: Mapping[str, Pair], idle: Mapping[str, Sequence[int]]) -> dict[str, Pair]:
    """Of the adapters that a folder has, those of idle weights. Raises UserError for another model's."""
    shapes, kept = {table_name(name): list(shape) for name, shape in idle.items()}, {}
    for stem, (a, b) in found.items():
        shape = shapes.get(f"{table_name(stem)}.weight")
        if shape not in (None, [len(b), a.shape[1]]):
            raise UserError(
                f"{stem}: its adapters are {list(a.shape)} and {list(b.shape)}, its weight {shape}: of another model"
            )
        if shape:
            kept[stem] = (a, b)
    return kept
