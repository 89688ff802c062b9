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
from typing import Any

import torch
from torch import Tensor

from megatron.vlm.hf.folder import DTYPE_NAMES, Stored, WeightFolder, write_weights
from megatron.vlm.hf.forms import join, split
from megatron.vlm.hf.names import Source, is_idle, table_name
from megatron.vlm.models.adapters import part_of_rows, rows_and_parts, wide
from omnibal_ext.adapters import SUFFIX, Adapters, Matrix, adapted_matrices
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.chain import PART_OF, PARTS, layer_names
from omnibal_ext.errors import UserError
from omnibal_ext.families.registry import family_of
from omnibal_ext.reading.checks import finite, record, shown, whole
from omnibal_ext.reading.document import read_json

CONFIG_FILE, WEIGHT_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ENDS = (".lora_A.weight", ".lora_B.weight")
REMEDY = "give a folder that peft saved"
CONFIG = record({"r": whole(1, 2**16), "lora_alpha": finite()})
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "modules_to_save": (None, []),
    **dict.fromkeys(("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out"), (False, None)),
}
"""Fields of peft's by which the same numbers would mean something else, and their values that mean nothing."""


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
        kind = torch.promote_types(weight.dtype, torch.float32)
        product = wide(b, self._mask(b)).to(kind) @ a.to(kind)
        return (weight.to(kind) + scale * product).to(weight.dtype)

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
) -> None:
    """Write a folder that `peft.PeftModel.from_pretrained` loads onto the model `base`.

    ours: a and b by name in our checkpoints. in_repository: the model's code is in its repository, where layers are
    called in memory as on disk.
    """
    tensors, ranks, alphas = dict[str, Tensor](), dict[str, int](), dict[str, float]()
    for layer in layers.values():
        pair = ours[f"{layer.beside}.a"], ours[f"{layer.beside}.b"]
        for theirs, both in layer.split(*pair, architecture).items():
            name = theirs if in_repository else in_memory(theirs, family_of(architecture).modules)
            tensors |= {f"{PREFIX}{name}{end}": tensor for end, tensor in zip(ENDS, both, strict=True)}
            if layer.times > 1:
                ranks[name], alphas[name] = layer.times * adapters.rank, layer.times * adapters.alpha
    layer_names = dict.fromkeys(name.removeprefix(PREFIX).removesuffix(ENDS[0]) for name in tensors if ENDS[0] in name)
    config = {
        "peft_type": "LORA", "base_model_name_or_path": base, "r": adapters.rank, "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True, "modules_to_save": None,
        "target_modules": list(layer_names), "rank_pattern": ranks, "alpha_pattern": alphas,
    }  # fmt: skip
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    stored = {n: Stored(WEIGHT_FILE, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()}
    write_weights(folder / WEIGHT_FILE, stored, tensors.items())


def in_memory(name: str, modules: Sequence[tuple[str, str]] = ()) -> str:
    """What transformers calls a layer in memory, of its name in the tables; `modules` are its family's own."""
    for pattern, replacement in (*modules, (r"^language_model\.model\.", "language_model.")):
        name = re.sub(pattern, replacement, name)
    return f"model.{name}"


def read_peft(
    folder: Path, layers: Mapping[str, AdaptedLayer], architecture: Architecture
) -> tuple[Adapters, dict[str, Tensor]]:
    """The adapters of a folder that peft saved, and their a and b by name in our checkpoints.

    Layers of a part of which others have adapters, and themselves none, get zeros, which training leaves as they are.
    Raises UserError for what is no folder of peft's, and adapters that are of another kind, model or layers than ours.
    """
    config = read_json(folder / CONFIG_FILE, CONFIG, REMEDY)
    for field, values in PLAIN.items():
        if (value := config.get(field, values[0])) not in values:
            raise UserError(f"{folder / CONFIG_FILE}: {field} is {shown(value)}; only {values[0]!r} is read here")
    weights, theirs = WeightFolder(folder / WEIGHT_FILE), dict[str, tuple[Tensor, Tensor]]()
    for name in weights.stored:
        stem = name.removesuffix(ENDS[0]).removesuffix(ENDS[1])
        both = [f"{stem}{end}" for end in ENDS]
        if name not in both or not all(one in weights.stored for one in both):
            raise UserError(f"{folder / WEIGHT_FILE}: {name} is not one of an A and a B; {REMEDY}")
        theirs[table_name(stem.removeprefix(PREFIX))] = (weights.tensor(both[0]), weights.tensor(both[1]))
    known = {name: layer for layer in layers.values() for name in layer.theirs}
    theirs = {name: both for name, both in theirs.items() if name in known or not is_idle(f"{name}.weight")}
    if strange := sorted(theirs.keys() - known.keys()):
        raise UserError(f"{folder}: has adapters of {strange[0]}, for which there are none here (docs/training.md)")
    parts = {known[name].part for name in theirs}
    adapters = Adapters(config["r"], float(config["lora_alpha"]), tuple(part for part in PARTS if part in parts))
    _check_patterns(folder, config, layers, adapters)
    ours = dict[str, Tensor]()
    for layer in layers.values():
        if layer.part in parts:
            a, b = layer.join(theirs, adapters.rank, architecture)
            ours |= {f"{layer.beside}.a": a, f"{layer.beside}.b": b}
    return adapters, ours


def _check_patterns(
    folder: Path, config: Mapping[str, Any], layers: Mapping[str, AdaptedLayer], adapters: Adapters
) -> None:
    """Raise UserError where layers have ranks or scales of their own, but for those that `write_peft` gives them."""
    times = {name: layer.times for layer in layers.values() for name in layer.theirs}
    for field, of_all in (("rank_pattern", adapters.rank), ("alpha_pattern", adapters.alpha)):
        for name, value in (config.get(field) or {}).items():
            if value != of_all * times.get(table_name(name), 1):
                raise UserError(
                    f"{folder / CONFIG_FILE}: {field} gives {shown(name)} {value}; one for all is read here"
                )
