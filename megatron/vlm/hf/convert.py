"""Hugging Face -> ours -> Hugging Face, with the memory of one weight.

Ours keeps, beside the weights, a folder `huggingface/`: config.json, tokenizer and the like, the list of the weights
with their files and shapes, and the few that the model never uses. What goes back has the same names in the same files.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.vlm.hf.adapters import AdaptedLayer, adapted_layers, read_peft, write_peft
from megatron.vlm.hf.checkpoint import OurCheckpoint, write_release
from megatron.vlm.hf.folder import DTYPES, Stored, WeightFolder, write_index, write_weights
from megatron.vlm.hf.forms import join, settled, split
from megatron.vlm.hf.names import Source, is_idle, sources, table_name
from megatron.vlm.hf.peft_config import Kept
from megatron.vlm.hf.precision import as_kept, say_type
from megatron.vlm.hf.shapes import weight_shape
from omnibal_ext.adapters import Adapters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.folder import CONFIG, INDEX, config_path, read_config, weight_file
from omnibal_ext.architectures.huggingface import read_architecture
from omnibal_ext.console import track
from omnibal_ext.errors import UserError
from omnibal_ext.families.registry import MODELS
from omnibal_ext.output import say
from omnibal_ext.reading.checks import anything, integer, listing, mapping, one_of
from omnibal_ext.reading.document import read_json

SIDE = "huggingface"
LISTING = "weights.json"
IDLE_FILE = "idle.safetensors"
NOT_COPIED = (INDEX, LISTING, Kept.FIELDS)
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".distcp"}


def _listed(place: str, value: Any) -> Any:
    """[file, type, shape] of a weight."""
    file, dtype, shape = listing(anything, 3, 3)(place, value)
    weight_file(f"{place}[0]", file)
    one_of(*DTYPES)(f"{place}[1]", dtype)
    listing(integer(0, 2**48), most=8)(f"{place}[2]", shape)
    return value


LISTED = mapping(_listed)
"""What `LISTING` must hold."""


@dataclass(frozen=True)
class KeyMap:
    """Which weights of a Hugging Face folder make which of ours, by the folder's own names."""

    architecture: Architecture
    sources: dict[str, Source]
    idle: list[str]
    """Weights that the model never uses."""
    shapes: dict[str, Tensor]
    """Ours, on the meta device."""

    @classmethod
    def of(cls, folder: Path, stored: Mapping[str, Stored], absent: Mapping[str, str] | None = None) -> "KeyMap":
        """Of the weights `stored`, with the config.json of `folder`; `absent` are others, and the files that lack them.

        Raises UserError naming a weight that is missing, or one that no part of the model would take.
        """
        architecture = read_architecture(folder)
        own = {table_name(name): name for name in stored}
        wanted = sources(architecture, *architecture.types, own)
        taken = {name for source in wanted.values() for name in source.theirs}
        if lacking := sorted(taken - own.keys()):
            files = {table_name(name): file for name, file in (absent or {}).items()}
            where = f" (in {files[lacking[0]]}, its {INDEX} says); download it again" if lacking[0] in files else ""
            raise UserError(
                f"{folder}: lacks {len(lacking)} weights that its {CONFIG} asks for, {lacking[0]} first{where}"
            )
        idle = [name for table, name in own.items() if table not in taken]
        if strange := [name for name in idle if not is_idle(table_name(name))]:
            raise UserError(f"{folder}: has {len(strange)} weights the model has no place for, {strange[0]} first")
        found, shapes = {}, {}
        for ours, source in wanted.items():
            names = tuple(own[name] for name in source.theirs)
            form = settled(source.form, stored[names[0]].shape, weight_shape(ours, architecture))
            found[ours] = replace(source, theirs=names, form=form)
            shapes[ours] = _joined(ours, found[ours], stored, architecture)
        return cls(architecture, found, idle, shapes)

    @property
    def layers(self) -> dict[str, AdaptedLayer]:
        """The layers that can have adapters, by the name of our weight."""
        return adapted_layers(self.architecture, self.sources)

    def join(self, ours: str, tensors: Iterable[Tensor]) -> Tensor:
        """Our weight of that name, of theirs."""
        return _join(self.sources[ours], tensors, self.architecture)

    def split(self, ours: str, tensor: Tensor) -> dict[str, Tensor]:
        """Their weights by name, of ours, or the part of them that it is; rows that only fill up a tensor-parallel
        group are left out.

        Raises UserError if the weight is smaller than the config.json says.
        """
        wanted = self.shapes[ours].shape
        if tensor.dim() != len(wanted) or any(have < want for have, want in zip(tensor.shape, wanted, strict=True)):
            raise UserError(
                f"{ours} has the shape {list(tensor.shape)}, {CONFIG} asks for {list(wanted)}: another model"
            )
        for dim, size in enumerate(wanted):
            tensor = tensor.narrow(dim, 0, size)
        source = self.sources[ours]
        return dict(zip(source.theirs, split(source.form, tensor, self.architecture), strict=True))


def _joined(ours: str, source: Source, stored: Mapping[str, Stored], architecture: Architecture) -> Tensor:
    """Our weight on the meta device, if theirs are as the config.json says. Raises UserError naming them otherwise."""
    for name in source.theirs:
        if not DTYPES[stored[name].dtype].is_floating_point:
            raise UserError(f"{name} is of type {stored[name].dtype}, which no weight can be; download it again")
    wanted = weight_shape(ours, architecture)
    try:
        found = _join(source, [_empty(stored[name]) for name in source.theirs], architecture)
    except (RuntimeError, IndexError, ValueError):
        found = None  # shapes that do not go together at all
    if found is None or tuple(found.shape) != wanted:
        have = ", ".join(f"{name} {list(stored[name].shape)}" for name in source.theirs)
        raise UserError(f"{have}: {CONFIG} asks for {list(wanted)} as {ours}; it describes another model")
    return found


def _join(source: Source, tensors: Iterable[Tensor], architecture: Architecture) -> Tensor:
    parts = [tensor if source.part is None else source.part.of(tensor) for tensor in tensors]
    return join(source.form, parts, architecture)


def _empty(entry: Stored) -> Tensor:
    return torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")


def from_hugging_face(folder: Path, output: Path, peft: Path | None = None) -> KeyMap:
    """Convert a folder of Hugging Face's to a checkpoint that the trainer loads at any layout; with the adapters in
    `peft`, if that is given.

    Raises UserError if the model or its weights cannot be honoured, or the output is there already.
    """
    config_path(folder)  # says so if this is no model's folder at all
    theirs = WeightFolder(folder)
    keys = KeyMap.of(folder, theirs.stored, theirs.absent)
    unused = {name: theirs.stored[name].shape for name in keys.idle}
    given = read_peft(peft, keys.layers, keys.architecture, unused) if peft else None
    added = given.ours if given else {}
    _make_empty(output)
    shapes = {**keys.shapes, **{name: tensor.to("meta") for name, tensor in added.items()}}
    turns = track(shapes, "converting", len(shapes))

    def make(ours: str) -> Tensor:
        next(turns)
        return added[ours] if ours in added else keys.join(ours, map(theirs.tensor, keys.sources[ours].theirs))

    write_release(output, shapes, make, {"adapters": given.adapters.to_record()} if given else {})
    next(turns, None)  # closes the progress bar
    _write_side(folder, output / SIDE, theirs, keys)
    if given:
        given.kept.write(output / SIDE)
        for note in given.notes:
            say(note, error=True)
    return keys


def _make_empty(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; choose another --output-dir or remove it")
    folder.mkdir(parents=True, exist_ok=True)


def _write_side(folder: Path, side: Path, theirs: WeightFolder, keys: KeyMap) -> None:
    _copy_all_but_weights(folder, side)
    if read_architecture(side).tied != keys.architecture.tied:
        # The folder's weights overrode its config, as they do in transformers; from here on the config says it.
        config = read_config(side / CONFIG)
        for section in (config, config.get("text_config", {})):
            section["tie_word_embeddings"] = keys.architecture.tied
        (side / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    listed = {name: [entry.file, entry.dtype, list(entry.shape)] for name, entry in theirs.stored.items()}
    (side / LISTING).write_text(json.dumps(listed, indent=1) + "\n")
    idle = {name: theirs.stored[name] for name in keys.idle}
    write_weights(side / IDLE_FILE, idle, ((name, theirs.tensor(name)) for name in idle))


def _copy_all_but_weights(folder: Path, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix not in WEIGHT_SUFFIXES and path.name not in NOT_COPIED:
            shutil.copyfile(path, output / path.name)


def to_hugging_face(folder: Path, output: Path, like: Path | None = None, step: int | None = None) -> KeyMap:
    """Write a folder's latest checkpoint, or that of `step`, as Hugging Face's: names and files of the model it is of.

    Adapters are merged into the weights that they stand beside.
    That model is found beside the checkpoint, or where the training run took it from (its --model), or it is `like`:
    a Hugging Face folder or one of ours. Raises UserError if it is not found or is another model.
    """
    ours, side, keys = _opened(folder, like, step)
    stored, idle_weights = _listing(side)
    _make_empty(output)
    stored = as_kept(stored, ours, keys.sources, keys.shapes)
    kept = _kept(side, folder, ours)
    files = sorted({entry.file for entry in stored.values()})
    for file in track(files, "writing", len(files)):
        here = {name: entry for name, entry in stored.items() if entry.file == file}
        write_weights(output / file, here, _tensors(here, keys, ours, idle_weights, kept))
    write_index(output, stored)
    _copy_all_but_weights(side, output)
    say_type(output, stored)
    return keys


def to_peft(folder: Path, output: Path, like: Path | None = None) -> KeyMap:
    """Write the adapters of the latest checkpoint of a folder as peft does, for the model that they were trained on.

    Raises UserError if there are none, or as `to_hugging_face`.
    """
    ours, side, keys = _opened(folder, like)
    adapters = Adapters.from_record(ours.run.get("adapters"))
    if not adapters.rank:
        raise UserError(f"{ours.folder}: has no adapters; --to-hf writes its weights")
    _make_empty(output)
    layers = {weight: layer for weight, layer in keys.layers.items() if layer.part in adapters.targets}
    tensors = {name: ours.tensor(name) for name in sorted(ours.adapters)}
    in_repository = not MODELS[keys.architecture.types[0]].in_transformers
    base = str(ours.preset or side)
    kept = _kept(side, folder, ours)
    write_peft(output, layers, adapters, tensors, keys.architecture, base, in_repository, kept)
    return keys


def _opened(folder: Path, like: Path | None, step: int | None = None) -> tuple[OurCheckpoint, Path, KeyMap]:
    """A checkpoint of a folder, every byte of it read; where the model it came from is described, and how."""
    ours = OurCheckpoint(folder, step=step)
    ours.verify()
    side = _find_side(folder, ours, like)
    keys = KeyMap.of(side, _listing(side)[0])
    if lacking := [name for name in keys.sources if name not in ours.weights]:
        raise UserError(f"{ours.folder}: has no weight {lacking[0]}; {side / CONFIG} describes another model")
    return ours, side, keys


def _find_side(folder: Path, ours: OurCheckpoint, like: Path | None) -> Path:
    candidates = [like, folder, ours.preset] if like is None else [like]
    for candidate in filter(None, candidates):
        for side in (candidate / SIDE, candidate):
            if (side / CONFIG).is_file():
                return side
    raise UserError(
        f"{folder}: nothing says what Hugging Face's model looks like; name the folder that the weights first came "
        "from with --like"
    )


def _kept(side: Path, folder: Path, ours: OurCheckpoint) -> Kept:
    """What a folder of peft's had beside the adapters that are trained: here, or where these came from."""
    return Kept.of(side, *(one / SIDE for one in (folder, ours.first) if one))


def _listing(side: Path) -> tuple[dict[str, Stored], Path]:
    """What the exported weights are called, and the folder or file that still holds those the model never uses."""
    if not (side / LISTING).is_file():
        return WeightFolder(side).stored, side
    listed = read_json(side / LISTING, LISTED, "convert again")
    return {name: Stored(file, dtype, tuple(shape)) for name, (file, dtype, shape) in listed.items()}, side / IDLE_FILE


def _tensors(
    here: Mapping[str, Stored], keys: KeyMap, ours: OurCheckpoint, idle_weights: Path, kept: Kept
) -> Iterator[tuple[str, Tensor]]:
    """The weights of one file, in the chain's order, adapters merged into them."""
    adapters, layers = Adapters.from_record(ours.run.get("adapters")), keys.layers
    begun: dict[str, list[Tensor]] = {}
    for name, source in keys.sources.items():
        if here.keys() & set(source.theirs):
            weight, layer = ours.tensor(name), layers.get(name)
            if layer and layer.part in adapters.targets:
                a, b = (ours.tensor(f"{layer.beside}.{one}") for one in "ab")
                weight = layer.merged(weight, a, b, adapters.scale)
            for theirs, tensor in keys.split(name, weight).items():
                if theirs not in here:
                    continue
                one = tensor.to(DTYPES[here[theirs].dtype])
                if source.part is None:
                    yield theirs, one
                    continue
                begun.setdefault(theirs, []).append(one)
                if len(begun[theirs]) == source.part.count:
                    yield theirs, torch.cat(begun.pop(theirs), dim=source.part.axis)
    if idle := [name for name in keys.idle if name in here]:
        aside, scale = WeightFolder(idle_weights), adapters.scale if adapters.rank else 0.0
        yield from ((name, kept.merged(name, aside.tensor(name), scale)) for name in idle)
