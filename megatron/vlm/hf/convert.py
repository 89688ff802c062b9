"""Conversion Hugging Face -> ours -> Hugging Face, with one weight in memory at a time.

Our checkpoint has a folder `huggingface/`: config.json, tokenizer and so on, the list of the original weights with
their files and shapes, and the few weights that the model never uses. An export has the same names in the same files.
"""

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.vlm.hf.adapters import AdaptedLayer, adapted_layers, read_peft, write_peft
from megatron.vlm.hf.checkpoint import OurCheckpoint, write_release
from megatron.vlm.hf.finite import Broken
from megatron.vlm.hf.folder import DTYPES, Stored, WeightFolder, write_index, write_weights
from megatron.vlm.hf.forms import join, resolve_form, split
from megatron.vlm.hf.names import WeightSource, is_unused, sources, table_name
from megatron.vlm.hf.peft_config import PeftExtras
from megatron.vlm.hf.precision import export_types, write_config_dtype
from megatron.vlm.hf.shapes import weight_shape
from omnibal_ext.adapters import Adapters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.folder import CONFIG, INDEX, config_path, read_config, weight_file, weight_files
from omnibal_ext.architectures.huggingface import read_architecture
from omnibal_ext.console import track
from omnibal_ext.errors import UserError
from omnibal_ext.families.registry import family_of, model_of
from omnibal_ext.files.records import write_text
from omnibal_ext.output import say
from omnibal_ext.reading.checks import anything, integer, listing, mapping, one_of
from omnibal_ext.reading.document import read_json

SIDE = "huggingface"
LISTING = "weights.json"
UNUSED_FILE = "idle.safetensors"
NOT_COPIED = (INDEX, LISTING, PeftExtras.FIELDS)
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".distcp"}


def _listed(where: str, value: Any) -> Any:
    """Check [file, dtype, shape] of a weight in weights.json, and return it."""
    file, dtype, shape = listing(anything, 3, 3)(where, value)
    weight_file(f"{where}[0]", file)
    one_of(*DTYPES)(f"{where}[1]", dtype)
    listing(integer(0, 2**48), most=8)(f"{where}[2]", shape)
    return value


LISTED = mapping(_listed)
"""Check of a file `LISTING`."""


@dataclass(frozen=True)
class KeyMap:
    """A map that says which weights of a Hugging Face folder, by their names there, make which of ours."""

    architecture: Architecture
    sources: dict[str, WeightSource]
    unused: list[str]
    """Names of the folder's weights that the model never uses."""
    shapes: dict[str, Tensor]
    """Our weights, on the meta device."""

    @classmethod
    def of(cls, folder: Path, stored: Mapping[str, Stored], absent: Mapping[str, str] | None = None) -> "KeyMap":
        """Map the weights `stored` in a folder to ours, as its config.json says; `absent`: as in `WeightFolder`. Raises
        UserError naming a missing weight, or one that the model does not have."""
        architecture = read_architecture(folder)
        family = family_of(architecture)
        own = {table_name(name, family): name for name in stored}
        wanted = sources(architecture, *architecture.types, own)
        taken = {name for source in wanted.values() for name in source.theirs}
        if lacking := sorted(taken - own.keys()):
            files = {table_name(name, family): file for name, file in (absent or {}).items()}
            where = f" (in {files[lacking[0]]}, its {INDEX} says); download it again" if lacking[0] in files else ""
            raise UserError(
                f"{folder}: lacks {len(lacking)} weights that its {CONFIG} asks for, {lacking[0]} first{where}"
            )
        unused = [name for table, name in own.items() if table not in taken]
        if strange := [name for name in unused if not is_unused(table_name(name, family), architecture, own)]:
            raise UserError(f"{folder}: has {len(strange)} weights the model has no place for, {strange[0]} first")
        found, shapes = {}, {}
        for ours, source in wanted.items():
            names = tuple(own[name] for name in source.theirs)
            form = resolve_form(source.form, stored[names[0]].shape, weight_shape(ours, architecture))
            found[ours] = replace(source, theirs=names, form=form)
            shapes[ours] = _joined(ours, found[ours], stored, architecture)
        return cls(architecture, found, unused, shapes)

    @property
    def layers(self) -> dict[str, AdaptedLayer]:
        """Layers that can have adapters, by our weight's name."""
        return adapted_layers(self.architecture, self.sources)

    def join(self, ours: str, tensors: Iterable[Tensor]) -> Tensor:
        """Join Hugging Face's tensors to our weight of that name."""
        return _join(self.sources[ours], tensors)

    def split(self, ours: str, tensor: Tensor) -> dict[str, Tensor]:
        """Split our weight into Hugging Face's tensors (or chunks) by name, without padding for tensor parallelism.

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
        return dict(zip(source.theirs, split(source.form, tensor, source.scope), strict=True))


def _joined(ours: str, source: WeightSource, stored: Mapping[str, Stored], architecture: Architecture) -> Tensor:
    """Return our weight on the meta device. Raises UserError naming tensors whose shape is not the config.json's."""
    for name in source.theirs:
        if not DTYPES[stored[name].dtype].is_floating_point:
            raise UserError(f"{name} is of type {stored[name].dtype}, which no weight can be; download it again")
    wanted = weight_shape(ours, architecture)
    try:
        entries = [stored[name] for name in source.theirs]
        theirs = [torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta") for entry in entries]
        found = _join(source, theirs)
    except (RuntimeError, IndexError, ValueError):
        found = None  # shapes that do not go together at all
    if found is None or tuple(found.shape) != wanted:
        have = ", ".join(f"{name} {list(stored[name].shape)}" for name in source.theirs)
        raise UserError(f"{have}: {CONFIG} asks for {list(wanted)} as {ours}; it describes another model")
    return found


def _join(source: WeightSource, tensors: Iterable[Tensor]) -> Tensor:
    parts = [tensor if source.chunk is None else source.chunk.of(tensor) for tensor in tensors]
    return join(source.form, parts, source.scope)


def from_hugging_face(folder: Path, output: Path, peft: Path | None = None) -> KeyMap:
    """Convert a Hugging Face folder, and the adapters of the folder `peft` if given, to a checkpoint for any layout.

    Raises UserError if the model or its weights are not supported, a weight is not finite, or the output exists.
    """
    config_path(folder)  # says so if this is no model's folder at all
    theirs = WeightFolder(folder)
    keys = KeyMap.of(folder, theirs.stored, theirs.absent)
    unused = {name: theirs.stored[name].shape for name in keys.unused}
    given = read_peft(peft, keys.layers, keys.architecture, unused) if peft else None
    added = given.ours if given else {}
    _make_empty(output)
    shapes = {**keys.shapes, **{name: tensor.to("meta") for name, tensor in added.items()}}
    turns, broken = track(shapes, "converting", len(shapes)), Broken()

    def make(ours: str) -> Tensor:
        next(turns)
        if ours in added:
            return added[ours]
        return keys.join(ours, (broken.seen(name, theirs.tensor(name)) for name in keys.sources[ours].theirs))

    write_release(output, shapes, make, {"adapters": given.adapters.to_record()} if given else {})
    next(turns, None)  # closes the progress bar
    if broken.names:
        _empty(output)
        broken.refuse(folder)
    _write_side(folder, output / SIDE, theirs, keys)
    if given:
        given.extras.write(output / SIDE)
        for note in given.notes:
            say(note, error=True)
    return keys


def _make_empty(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; choose another --output-dir or remove it")
    folder.mkdir(parents=True, exist_ok=True)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _write_side(folder: Path, side: Path, theirs: WeightFolder, keys: KeyMap) -> None:
    _copy_all_but_weights(folder, side, family_of(keys.architecture).kept)
    if read_architecture(side).tied != keys.architecture.tied:
        # The folder's weights overrode its config, as they do in transformers; from here on the config says it.
        config = read_config(side / CONFIG)
        thinker = config.get("thinker_config", config)
        for section in (thinker, thinker.get("text_config", {})):
            section["tie_word_embeddings"] = keys.architecture.tied
        write_text(side / CONFIG, json.dumps(config, indent=2) + "\n")
    listed = {name: [entry.file, entry.dtype, list(entry.shape)] for name, entry in theirs.stored.items()}
    write_text(side / LISTING, json.dumps(listed, indent=1) + "\n")
    unused = {name: theirs.stored[name] for name in keys.unused}
    write_weights(side / UNUSED_FILE, unused, ((name, theirs.tensor(name)) for name in unused))


def _copy_all_but_weights(folder: Path, output: Path, kept: Collection[str]) -> None:
    """Copy a model folder's files, and those `kept` although they are named like weights (`Family.kept`)."""
    output.mkdir(parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        is_weights = path.suffix in WEIGHT_SUFFIXES and path.name not in kept
        if path.is_file() and not is_weights and path.name not in NOT_COPIED:
            shutil.copyfile(path, output / path.name)


def to_hugging_face(folder: Path, output: Path, like: Path | None = None, step: int | None = None) -> KeyMap:
    """Export a folder's latest checkpoint, or that of iteration `step`, to a Hugging Face folder; adapters are merged.

    Names and files are those of the original model: `like` (a Hugging Face folder or a checkpoint of ours), else the
    checkpoint's `huggingface/`, else the run's --model. Weights that are not finite are written with a warning. Raises
    UserError if there is no checkpoint or it is another model.
    """
    ours, side, keys = _opened(folder, like, step)
    stored, unused_weights = _listing(side)
    _make_empty(output)
    stored = export_types(stored, ours, keys.sources, keys.shapes)
    extras = _extras(side, folder, ours)
    files, broken = sorted({entry.file for entry in stored.values()}), Broken()
    for file in track(files, "writing", len(files)):
        here = {name: entry for name, entry in stored.items() if entry.file == file}
        tensors = _tensors(here, keys, ours, unused_weights, extras)
        used = here.keys() - keys.unused
        write_weights(
            output / file, here, ((name, broken.seen(name, one) if name in used else one) for name, one in tensors)
        )
    broken.warn(ours.folder)
    write_index(output, stored)
    _copy_all_but_weights(side, output, family_of(keys.architecture).kept)
    write_config_dtype(output, stored)
    return keys


def to_peft(folder: Path, output: Path, like: Path | None = None) -> KeyMap:
    """Write the adapters of a folder's latest checkpoint as a peft folder for the model they were trained on. Raises
    UserError if there are no adapters, and as `to_hugging_face` does."""
    ours, side, keys = _opened(folder, like)
    adapters = Adapters.from_record(ours.run.get("adapters"))
    if not adapters.rank:
        raise UserError(f"{ours.folder}: has no adapters; --to-hf writes its weights")
    _make_empty(output)
    layers = {weight: layer for weight, layer in keys.layers.items() if layer.target in adapters.targets}
    broken = Broken()
    tensors = {name: broken.seen(name, ours.tensor(name)) for name in sorted(ours.adapters)}
    broken.warn(ours.folder)
    kind = model_of(read_config(side / CONFIG))
    base, extras = str(ours.preset or side), _extras(side, folder, ours)
    write_peft(output, layers, adapters, tensors, keys.architecture, base, not kind.transformers, kind.inside, extras)
    return keys


def _opened(folder: Path, like: Path | None, step: int | None = None) -> tuple[OurCheckpoint, Path, KeyMap]:
    """Open a folder's checkpoint, verified; also return the original model's folder, and the map of its weights."""
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


def _extras(side: Path, folder: Path, ours: OurCheckpoint) -> PeftExtras:
    """Read what the peft folder of the adapters had besides them; empty if they are not from one."""
    return PeftExtras.of(side, *(one / SIDE for one in (folder, ours.first) if one))


def _listing(side: Path) -> tuple[dict[str, Stored], Path]:
    """Return the original weights by name, and the folder or file that holds the unused ones."""
    if not (side / LISTING).is_file():
        if not weight_files(side):
            raise UserError(
                f"{side}: has no weights, as whose an export's are named and stored: give --like, a folder of the same "
                "model with weights"
            )
        return WeightFolder(side).stored, side
    listed = read_json(side / LISTING, LISTED, "convert again")
    return {
        name: Stored(file, dtype, tuple(shape)) for name, (file, dtype, shape) in listed.items()
    }, side / UNUSED_FILE


def _tensors(
    here: Mapping[str, Stored], keys: KeyMap, ours: OurCheckpoint, unused_weights: Path, extras: PeftExtras
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one exported file, in the chain's order, adapters merged."""
    adapters, layers = Adapters.from_record(ours.run.get("adapters")), keys.layers
    begun: dict[str, list[Tensor]] = {}
    for name, source in keys.sources.items():
        if here.keys() & set(source.theirs):
            weight, layer = ours.tensor(name), layers.get(name)
            if layer and layer.target in adapters.targets:
                a, b = (ours.tensor(f"{layer.adapter_name}.{one}") for one in "ab")
                weight = layer.merged(weight, a, b, adapters.scale)
            for theirs, tensor in keys.split(name, weight).items():
                if theirs not in here:
                    continue
                one = tensor.to(DTYPES[here[theirs].dtype])
                if source.chunk is None:
                    yield theirs, one
                    continue
                begun.setdefault(theirs, []).append(one)
                if len(begun[theirs]) == source.chunk.count:
                    yield theirs, torch.cat(begun.pop(theirs), dim=source.chunk.axis)
    if unused := [name for name in keys.unused if name in here]:
        held, scale = WeightFolder(unused_weights), adapters.scale if adapters.rank else 0.0
        family = family_of(keys.architecture)
        yield from ((name, extras.merged(name, held.tensor(name), scale, family)) for name in unused)
