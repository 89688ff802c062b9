"""Which weights a run starts from: the first of these that there is.

1. "own": the run's last checkpoint, in --load or in --save, so that a requeued job resumes.
2. "given": the folder of --from, with a new optimizer at iteration 0. "unconverted": if it holds Hugging Face weights.
3. "random": with --from-scratch only.
"""

import os
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.vlm.checkpoint.folder import TRACKER, Checkpoints
from megatron.vlm.hf.checkpoint import OurCheckpoint
from megatron.vlm.hf.convert import SIDE, KeyMap
from megatron.vlm.hf.folder import WeightFolder
from megatron.vlm.hf.names import sources
from megatron.vlm.hf.shapes import weight_shape
from omnibal_ext.adapters import NO_ADAPTERS, Adapters
from omnibal_ext.architectures.architecture import Architecture, differences
from omnibal_ext.architectures.folder import CONFIG, weight_files
from omnibal_ext.architectures.presets import preset
from omnibal_ext.errors import UserError


@dataclass(frozen=True)
class Weights:
    """What a run starts from. `iteration` is 0 unless the run resumes; `folder` is None for random weights."""

    kind: Literal["own", "given", "unconverted", "random"]
    folder: Path | None = None
    iteration: int = 0

    @property
    def model_folder(self) -> Path | None:
        """The folder with the weights' config.json and tokenizer, if there is one."""
        for folder in (self.folder / SIDE, self.folder) if self.folder else ():
            if (folder / CONFIG).is_file():
                return folder
        return None

    def ends(self, train_iters: int | None) -> bool:
        """Say whether a run of so many iterations has ended with these weights."""
        return self.kind == "own" and bool(train_iters) and self.iteration >= (train_iters or 0)

    def refuse_unconverted(self) -> None:
        """Raise UserError for Hugging Face weights, which must be converted first."""
        if self.kind == "unconverted":
            raise UserError(
                f"--from {self.folder}: is a folder of Hugging Face's; convert it with omnibal convert "
                f"--from-hf {self.folder} --output-dir CONVERTED, then --from CONVERTED (omnibal launch does both)"
            )

    def describe(self) -> str:
        """Return a short description for the table of checks."""
        words = {
            "own": f"goes on from iteration {self.iteration} in {self.folder}",
            "given": f"first weights from {self.folder}",
            "unconverted": f"first weights from {self.folder}, to be converted",
            "random": "random (--from-scratch)",
        }
        return words[self.kind]


def starting_weights(args: Namespace) -> Weights:
    """Return the weights that --load, --save, --from and --from-scratch select.

    Raises UserError if they select none or contradict each other, or if a named folder holds no weights.
    """
    load, save, first = map(_path, (args.load, args.save, args.first_weights or args.pretrained_checkpoint))
    if load and not load.is_dir() and load != save:
        raise UserError(f"--load {load}: no such folder; give the folder of a run's checkpoints, or leave --load out")
    if first and args.from_scratch:
        raise UserError(f"--from {first} and --from-scratch exclude each other; leave one out")
    if load and Checkpoints(load).are_release:  # converted weights, not a run's checkpoints
        if first and first != load:
            raise UserError(f"--load {load} and --from {first} both name first weights; leave one out")
        load, first = None, load
    if load and save and load != save and Checkpoints(load).exist and Checkpoints(save).exist:
        raise UserError(
            f"--load {load} and --save {save} both hold a run's checkpoints; leave --load out to go on with the run in "
            f"--save, or choose another --save"
        )
    if save and Checkpoints(save).are_release:
        raise UserError(
            f"--save {save}: holds converted weights, which are no run's own; choose another --save (--from {save} "
            "starts from them)"
        )
    for folder in (load, save):
        if folder and Checkpoints(folder).exist:
            return _last_checkpoint(folder, args)
    if first:
        return _first_weights(first)
    if args.from_scratch:
        return Weights("random")
    where = f"; --load {load} holds no checkpoint" if load else ""
    raise UserError(
        f"no weights to start from{where}: --from FOLDER takes a model of Hugging Face's or a converted one (as does "
        "--model of omnibal launch), --from-scratch draws random ones"
    )


def apply_weights(args: Namespace, weights: Weights) -> None:
    """Set Megatron's flags to load `weights`. Raises UserError if they are not converted."""
    weights.refuse_unconverted()
    resumes = weights.kind == "own"
    args.load = str(weights.folder) if resumes else None
    args.pretrained_checkpoint = str(weights.folder) if weights.kind == "given" else None
    args.exit_on_missing_checkpoint = resumes


def check_weights(
    weights: Weights,
    architecture: Architecture,
    trust: bool = False,
    step: int | None = None,
    adapters: Adapters = NO_ADAPTERS,
) -> OurCheckpoint | None:
    """Return the checkpoint of the weights: of `step` (--ckpt-step), or the newest; None if they are not in our format.

    Raises UserError if they are of another model, if the save is incomplete (with --from, the tracked one), or if they
    have other adapters than the run's, `adapters`. Reads metadata only.
    """
    if weights.folder is None:
        return None
    if weights.model_folder:
        found = preset(str(weights.model_folder))
        if unlike := differences(found, architecture):
            listed = ", ".join(f"{name} {theirs} (not {ours})" for name, theirs, ours in unlike)
            raise UserError(
                f"{weights.folder}: its model has {listed}, unlike --model {architecture.name}; leave --model out or "
                "give the folder's own"
            )
    if weights.kind == "unconverted":
        stored = WeightFolder(weights.folder)
        KeyMap.of(weights.folder, stored.stored, stored.absent)
        return None
    if weights.kind == "given":
        Checkpoints(weights.folder).first_weights(step, trust)
    checkpoint = OurCheckpoint(weights.folder, trust, step)
    _check_contents(checkpoint, architecture)
    _check_adapters(weights, checkpoint, adapters)
    return checkpoint


def _path(name: str | None) -> Path | None:
    return Path(os.path.normpath(name)) if name else None


def _last_checkpoint(folder: Path, args: Namespace) -> Weights:
    """Return the newest complete save of a run. Raises UserError if there is none, or under --fresh."""
    save = Checkpoints(folder).newest(args.ckpt_step, args.trust)
    if args.fresh:
        raise UserError(f"--fresh: {folder} holds a run's {save.path.name}; choose a new --save, or leave --fresh out")
    return Weights("own", folder, save.iteration)


def _first_weights(folder: Path) -> Weights:
    if Checkpoints(folder).exist:
        return Weights("given", folder)
    if not folder.is_dir():
        raise UserError(f"--from {folder}: no such folder; models are not downloaded")
    if (folder / CONFIG).is_file() and weight_files(folder):
        return Weights("unconverted", folder)
    raise UserError(
        f"--from {folder}: holds neither a checkpoint ({TRACKER}) nor a model of Hugging Face's ({CONFIG} and "
        "safetensors weights); name the folder of the weights, or use --from-scratch for random ones"
    )


def _check_contents(checkpoint: OurCheckpoint, architecture: Architecture) -> None:
    """Raise UserError for a missing or unexpected weight, or one of another size."""
    wanted = sources(architecture, *architecture.types).keys()
    trained = f"{checkpoint.folder}: not of model {architecture.name!r}"
    if lacking := sorted(wanted - checkpoint.weights.keys()):
        raise UserError(f"{trained}: lacks {len(lacking)} of its weights, {lacking[0]} first; give its own --model")
    if strange := sorted(checkpoint.weights.keys() - wanted - checkpoint.adapters):
        raise UserError(f"{trained}: has {len(strange)} weights more, {strange[0]} first; give its own --model")
    for name, size in _sizes(architecture).items():
        found = tuple(checkpoint.weights[name].size)
        # The vocabulary is padded to a multiple of the tensor-parallel size.
        if found != size and not (".word_embed." in name and found[1] == size[1] and found[0] > size[0]):
            raise UserError(f"{trained}: {name} is {found}, wanted {size}; give its own --model")


def _check_adapters(weights: Weights, checkpoint: OurCheckpoint, adapters: Adapters) -> None:
    saved = Adapters.from_record(checkpoint.run.get("adapters"))
    if saved.rank and saved != adapters:
        raise UserError(
            f"{checkpoint.folder}: has adapters; give {' '.join(saved.flags)}, or merge them into the weights: "
            f"omnibal convert --to-hf {weights.folder} --output-dir MERGED, then --from MERGED"
        )
    if weights.kind == "own" and checkpoint.run and saved != adapters:
        raise UserError(
            f"{' '.join(adapters.flags)}: the run in {weights.folder} has trained no adapters so far; leave them out, "
            f"or begin another run with its weights: --from {weights.folder}, with a new --save"
        )


def _sizes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a few weights that have all of a model's widths."""
    usual, layers = architecture.language.usual, architecture.language.each_layer
    perceptron = f"links.llm_{layers.index(usual)}.mlp" + ".experts.experts" * (usual.experts is not None)
    shown = (
        f"links.{'vit_0.mlp.linear_fc1' if architecture.vision.layers else 'patch_embed.projection'}.weight",
        "links.word_embed.embedding.weight",
        f"{perceptron}.linear_fc1.weight",
        "links.llm_0.self_attention.linear_qkv.weight",
    )
    return {name: weight_shape(name, architecture) for name in shown}
