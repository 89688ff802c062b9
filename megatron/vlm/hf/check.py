"""--check: logits of a converted model against transformers' model, in fp32, on random or a dataset's samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.checkpoint.guard import load_complete
from megatron.vlm.data.inputs.images import order_tensors
from megatron.vlm.hf.check_samples import CheckSample, random_samples, samples_of
from megatron.vlm.hf.checkpoint import OurCheckpoint
from megatron.vlm.hf.further import FURTHER_INPUTS
from megatron.vlm.hf.pack_inputs import by_rows, padded_patches, whole_images
from megatron.vlm.hf.peft_config import PREFIX
from megatron.vlm.media import Images, Media, together
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.adapters import merge
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.single import single_process
from omnibal_ext.adapters import Adapters
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.folder import config_path, image_token_id, read_config, token_ids
from omnibal_ext.architectures.huggingface import read_architecture
from omnibal_ext.architectures.presets import preset
from omnibal_ext.errors import UserError, missing_package
from omnibal_ext.families.registry import MODELS, model_of
from omnibal_ext.joining.positions import text_and_image_positions
from omnibal_ext.modalities.modality import VISION
from omnibal_ext.modalities.vision.architecture import VisionArchitecture
from omnibal_ext.modalities.vision.normalization import NORMALIZATIONS
from omnibal_ext.output import say

TOLERANCE = 1e-4


def check_possible(theirs: Path, with_adapters: bool = False) -> None:
    """Raise UserError if the model is unknown, or transformers (peft) is missing or does not have it."""
    read_architecture(theirs)  # raises for unknown models
    if not model_of(read_config(config_path(theirs))).transformers:
        raise UserError(
            f"{theirs}: --check runs transformers' own models; this one's code is in its repository, and is not run. "
            "Leave --check out, or convert the model's -hf variant"
        )
    for package in ("transformers", *["peft"] * with_adapters):
        try:
            import_module(package)
        except ImportError as error:
            raise UserError(
                f"--check needs {missing_package(package) or f'{package}: pip install {package}'}"
            ) from error


@dataclass(frozen=True)
class LogitDifference:
    """Largest differences of logits, divided by max(1, largest logit)."""

    difference: float
    """Difference between our model on one pack and transformers' on each sample."""
    rounding: float | None = None
    """Difference between our model with adapters and with merged, rounded weights; None: no adapters were merged."""


def compared(ours: Path, theirs: Path, peft: Path | None = None, data: Path | None = None) -> LogitDifference:
    """Compare logits of both models on random samples, or on two of the dataset `data`.

    `peft`: transformers' model loads this folder's adapters; without it our adapters are compared merged.
    """
    architecture, image_token = preset(str(theirs)), _image_token(theirs)
    samples = samples_of(data) if data else []
    if data and not samples:
        say(
            f"note: {data}: has no samples but with videos or unreadable images; logits are compared on random ones",
            error=True,
        )
    samples = samples or random_samples(architecture, image_token, _meant(theirs))
    unmerged, merged = _our_logits(ours, theirs, architecture, samples, image_token, is_merged=peft is None)
    wanted = _their_logits(theirs, samples, peft, architecture.vision)
    scale = max(1.0, nan_max([logits.abs() for logits in wanted]))
    rounding = None if merged is None else largest_difference(unmerged, merged) / scale
    return LogitDifference(largest_difference(merged or unmerged, wanted) / scale, rounding)


def largest_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference of two models' logits."""
    return nan_max([(a - b).abs() for a, b in zip(ours, theirs, strict=True)])


def nan_max(differences: Sequence[torch.Tensor]) -> float:
    """Return the largest of all values; NaN if any is NaN (Python's `max` would skip it)."""
    return torch.stack([each.max() for each in differences]).max().item()


def _image_token(theirs: Path) -> int:
    token = image_token_id(read_config(config_path(theirs)))
    return 151667 if token is None else int(token)


def _meant(theirs: Path) -> set[int]:
    """Return the ids of all tokens that config.json names: of images and sounds, beginnings, ends, padding."""
    return {*token_ids(read_config(config_path(theirs)))}


def _our_logits(
    ours: Path,
    theirs: Path,
    architecture: Architecture,
    samples: list[CheckSample],
    image_token: int,
    is_merged: bool,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
    """Return logits of each sample; also those with merged adapters, if `is_merged` and there are some, else None."""
    checkpoint = OurCheckpoint(ours)
    adapters = Adapters.from_record(checkpoint.run.get("adapters"))
    step = ["--ckpt-step", str(checkpoint.save.iteration)] if checkpoint.save.iteration else []
    flags = ["--load", str(ours), *step, *adapters.flags, "--ckpt-format", "torch_dist"]
    flags += ["--no-load-optim", "--no-load-rng", "--exit-on-missing-checkpoint"]
    platform.multiply_exactly()
    with single_process(str(theirs), flags) as inputs, torch.no_grad():
        chain = Chain.of(inputs.args, architecture)
        stage = Stage(chain, 0, len(chain.kinds)).cuda()
        load_complete([stage], None, None)
        batch, lengths = _pack(samples, image_token), [len(sample.ids) for sample in samples]
        batch = _with_further(batch, samples, architecture)

        def logits() -> tuple[Tensor, ...]:
            return stage.eval()(batch).cpu()[:, : architecture.language.vocab_size].float().split(lengths)

        unmerged = logits()
        if not (adapters.rank and is_merged):
            return unmerged, None
        merge(stage, {name: entry.properties.dtype for name, entry in checkpoint.weights.items()})
        return unmerged, logits()


def _pack(samples: list[CheckSample], image_token: int) -> Microbatch:
    ids = torch.cat([sample.ids for sample in samples])
    begins = np.cumsum([0, *(len(sample.ids) for sample in samples)]).tolist()
    orders = order_tensors(image for sample in samples for image in sample.images)
    images = Images(
        pieces=together(sum(len(sample.pixels) for sample in samples)),
        values=torch.cat([sample.pixels for sample in samples]).to("cuda"),
        positions=(ids == image_token).nonzero().squeeze(1).to("cuda"),
        **{name: tensor.to("cuda") for name, tensor in orders.items()},
        grids=tuple(grid for sample in samples for grid in sample.grids),
        starts=tuple(begin + start for begin, sample in zip(begins, samples, strict=False) for start in sample.starts),
    )
    return Microbatch(
        lengths=tuple(len(sample.ids) for sample in samples),
        samples=len(samples),
        useful_tokens=len(ids),
        media={VISION.size: images},
        input_ids=ids.to("cuda"),
        prefixes=tuple(sample.prefix for sample in samples),
    )


def _with_further(batch: Microbatch, samples: list[CheckSample], architecture: Architecture) -> Microbatch:
    """Add the samples' inputs beyond images, such as sounds, to the batch."""
    assert batch.input_ids is not None
    media = dict(batch.media)
    for size, token in architecture.prompt.further_token_ids.items():
        each = [sample.further.get(size, ()) for sample in samples]
        values = [one for inputs in each for one in inputs]
        media[size] = Media(
            pieces=tuple(tuple(map(len, inputs)) for inputs in each),
            values=torch.cat(values).to("cuda") if values else None,
            positions=(batch.input_ids == token).nonzero().squeeze(1),
        )
    return replace(batch, media=media)


def _merged(model: Any, folder: Path, inside: str) -> Any:
    """Merge a peft folder's adapters, of which names may begin with `inside`, into transformers' model."""
    from peft import PeftConfig, PeftModel, get_peft_model, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    if not inside:
        return PeftModel.from_pretrained(model, folder, torch_device="cpu").merge_and_unload()
    config, stem = PeftConfig.from_pretrained(str(folder)), f"{PREFIX}{inside}"
    if not isinstance(config.target_modules, str):
        config.target_modules = {name.removeprefix(inside) for name in config.target_modules}
    for field in ("rank_pattern", "alpha_pattern"):
        setattr(config, field, {name.removeprefix(inside): value for name, value in getattr(config, field).items()})
    weights = load_peft_weights(str(folder), device="cpu")
    renamed = {name.replace(stem, PREFIX, 1) if name.startswith(stem) else name: one for name, one in weights.items()}
    adapted = get_peft_model(model, config)
    set_peft_model_state_dict(adapted, renamed)
    return adapted.merge_and_unload()


@torch.no_grad()
def _their_logits(
    theirs: Path, samples: list[CheckSample], peft: Path | None, vision: VisionArchitecture
) -> list[Tensor]:
    import transformers

    kind = model_of(read_config(config_path(theirs)))
    model = getattr(transformers, kind.transformers).from_pretrained(theirs, dtype=torch.float32).eval()
    if peft:
        model = _merged(model, peft, kind.inside)
    takes = MODELS[model.config.model_type].takes
    inputs = (
        {**_images(sample, model.config, takes, vision), **_answer(sample), **_further(sample)} for sample in samples
    )
    return [model(input_ids=sample.ids[None], **more).logits[0] for sample, more in zip(samples, inputs, strict=True)]


def _further(sample: CheckSample) -> dict[str, Tensor]:
    given = (FURTHER_INPUTS[size].given(inputs) for size, inputs in sample.further.items())
    return {name: value for one in given for name, value in one.items()}


def _answer(sample: CheckSample) -> dict[str, Tensor]:
    """Return token_type_ids, 0 for the prefix of a prefix-LM; {} for other models."""
    return {"token_type_ids": (torch.arange(len(sample.ids)) >= sample.prefix).long()[None]} if sample.prefix else {}


def _images(sample: CheckSample, config: Any, takes: Sequence[str], vision: VisionArchitecture) -> dict[str, Tensor]:
    """Return the arguments of transformers' model for a sample's images."""
    if not len(sample.pixels):
        return {}
    pixels, is_image = sample.pixels, (sample.ids == config.image_token_id).long()[None]
    if "image_position_ids" in takes:
        assert vision.native is not None
        patches = padded_patches(pixels, sample.grids, vision.native.merge, NORMALIZATIONS[vision.pixels])
        return {**patches, "mm_token_type_ids": is_image}
    if "pixel_attention_mask" in takes:  # no tile has padding
        filled = torch.ones(1, len(pixels), *pixels.shape[-2:], dtype=torch.bool)
        return {"pixel_values": pixels[None], "pixel_attention_mask": filled}
    sizes = [(height, width) for width, height in sample.sizes]
    if sample.grids and "image_sizes" in takes:
        pixels, sizes = whole_images(pixels, sample.grids)
    elif "pixel_values" in takes:
        pixels = by_rows(pixels, sample.grids)
    elif sample.grids:  # a patch holds equal frames, channel by channel
        frames = config.vision_config.temporal_patch_size
        pixels = pixels.unsqueeze(2).expand(-1, -1, frames, -1, -1).flatten(1)
    known = {
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor(sample.grids),
        "mm_token_type_ids": is_image,
        "token_type_ids": is_image,
        "image_sizes": torch.tensor(sizes),
        "batch_num_images": torch.tensor([len(sample.sizes)]),
    }
    if "position_ids" in takes:  # which it would find by words around images, and random samples have none
        assert vision.native is not None
        positions = text_and_image_positions([len(sample.ids)], sample.grids, sample.starts, vision.native)
        known["position_ids"] = torch.from_numpy(positions)[:, None]
    return {name: known[name] for name in ("pixel_values", *takes) if name in known}
