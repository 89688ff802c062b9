"""A model of transformers that is tried: whole if it is small, of a large one the first layer of each kind."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron.vlm.prove.findings import IGNORED
from omnibal_ext.errors import UserError

WHOLE = 2**26
"""Weights of a model that is run whole."""
DEPTHS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers")
OF_LAYERS = {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [1]}
"""Fields that number an encoder's layers, for one of two: features may be the last layer's but one."""


class Ran(NamedTuple):
    """What a model made of a batch."""

    logits: Tensor
    """[B, T, V], without gradients."""
    loss: Tensor | None
    """The model's own."""
    summed: Tensor
    """Of the losses of its supervised tokens."""
    count: int
    """Of these."""
    positions: Tensor | None
    """[axes, B, T], as the language model's rotation is given them; None: it has none."""


def load(folder: Path, seed: int) -> Any:
    """The model of a folder, with its weights or else random ones. Raises UserError for what transformers lacks."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        kind = getattr(transformers, config.architectures[0])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder}: no config.json of a model that transformers has: {error}") from error
    with torch.device("meta"):
        is_large = sum(weight.numel() for weight in kind(config).parameters()) > WHOLE
    if not is_large and any(folder.glob("*.safetensors")):
        return ready(kind.from_pretrained(folder))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return ready(kind(first_layers(config) if is_large else config))


def ready(model: Any) -> Any:
    """The model in fp32, without dropout, and without a cache, as Trainer sets it: with one, packs are not seen."""
    model.config.use_cache = model.config.get_text_config().use_cache = False
    return model.eval().float()


def first_layers(config: Any) -> Any:
    """The configuration with the first layer of each kind of the language model, and two of each encoder."""
    text = config.get_text_config()
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ["full_attention"]))
    text.num_hidden_layers = len(kinds)
    if getattr(text, "layer_types", None):
        text.layer_types = kinds
    encoders = [part for name in config.sub_configs if (part := getattr(config, name)) is not None and part is not text]
    for part in encoders:
        fewer = {name: min(2, getattr(part, name)) for name in DEPTHS if hasattr(part, name)}
        for name, value in (fewer | {name: value for name, value in OF_LAYERS.items() if hasattr(part, name)}).items():
            setattr(part, name, value)
    return config


def run(model: Any, batch: Mapping[str, Any]) -> Ran:
    """Run the model on a batch of tensors."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:  # of the batch before
            module.rope_deltas = None
    with _rotated(model) as places:
        out = model(**batch)
    targets = labels_of(batch)[:, 1:].flatten()
    logits = out.logits[:, :-1].flatten(0, 1).float()
    summed = cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    count = int((targets != IGNORED).sum())
    return Ran(out.logits.detach(), out.loss, summed, count, places[0] if places else None)


def labels_of(batch: Mapping[str, Any]) -> Tensor:
    """Labels [B, T], each at its own token, -100 where there is none."""
    none = torch.full_like(batch["input_ids"], IGNORED)
    if (ahead := batch.get("shift_labels")) is not None:
        return torch.cat([none[:, :1], ahead[:, :-1]], dim=1)
    return none if batch.get("labels") is None else batch["labels"]


@contextmanager
def _rotated(model: Any) -> Iterator[list[Tensor]]:
    """The positions that the language model's rotations are given, one after another."""
    places: list[Tensor] = []

    def note(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = named["position_ids"] if "position_ids" in named else args[1]
        places.append(given if given.dim() == 3 else given[None])

    parts = model.get_decoder().named_modules()
    rotations = [part for name, part in parts if "rotary_emb" in name and "vis" not in name]
    hooks = [part.register_forward_pre_hook(note, with_kwargs=True) for part in rotations]
    try:
        yield places
    finally:
        for hook in hooks:
            hook.remove()


def gradients(model: Any) -> dict[str, Tensor]:
    """The weights' gradients, which the model then forgets."""
    found = {name: torch.zeros(()) if one.grad is None else one.grad for name, one in model.named_parameters()}
    model.zero_grad()
    return found


def difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], factor: float) -> tuple[float, str]:
    """The largest difference of gradients over `factor`, relative to each weight's largest (at least a hundredth of all
    weights'), and where it is."""
    most = {name: float(one.abs().max()) for name, one in wanted.items()}
    least = max(1e-2 * max(most.values()), 1e-30)
    each = ((float((found[name] / factor - own).abs().max()) / max(least, most[name]), name)
            for name, own in wanted.items())  # fmt: skip
    return max(each)
