"""Does a converted model answer as Hugging Face's own? Both in fp32 on random images and words."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from megatron.training.checkpointing import load_checkpoint
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.data.media.anyres import FeatureOrder, feature_order, order_tensors
from megatron.vlm.data.media.tiles import ANYRES_MAX_GRIDS, Tiling, tile_image
from megatron.vlm.hf.checkpoint import OurCheckpoint
from megatron.vlm.microbatch import Grid, Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.single import single_process
from omnibal_ext.adapters import Adapters
from omnibal_ext.architectures.architecture import Architecture, NativeResolution
from omnibal_ext.architectures.huggingface import config_path, image_token_id, read_config
from omnibal_ext.architectures.presets import preset
from omnibal_ext.errors import UserError

TOLERANCE = 1e-4
WORDS = 16
# Width and height of each sample's images, in tiles; one sample has none.
IMAGES: tuple[tuple[tuple[float, float], ...], ...] = (((2.1, 1.3), (0.7, 1.9)), (), ((1.0, 1.0),))


def check_possible(theirs: Path, with_adapters: bool = False) -> None:
    """Raises UserError where there is no model of transformers to compare with."""
    if read_config(config_path(theirs))["model_type"] == "internvl_chat":
        raise UserError(
            f"{theirs}: --check runs transformers' own models; this one's code is in its repository, and is not run. "
            "Leave --check out, or convert the model's -hf variant"
        )
    for package in ("transformers", *["peft"] * with_adapters):
        try:
            import_module(package)
        except ImportError as error:
            raise UserError(f"--check needs {package}: pip install {package}") from error


def logit_difference(ours: Path, theirs: Path, peft: Path | None = None) -> float:
    """Largest absolute difference of the logits of one pack by us, of its samples one by one by transformers.

    `peft`: theirs with the adapters in that folder.
    """
    architecture = preset(str(theirs))
    image_token = _image_token(theirs)
    samples = [_Sample(architecture, sizes, image_token, seed) for seed, sizes in enumerate(IMAGES)]
    mine = _our_logits(ours, theirs, architecture, samples, image_token)
    return largest([(a - b).abs() for a, b in zip(mine, _their_logits(theirs, samples, peft), strict=True)])


def largest(differences: Sequence[torch.Tensor]) -> float:
    """The largest of all of them; not a number if one is none, which Python's `max` passes over."""
    return torch.stack([each.max() for each in differences]).max().item()


def _image_token(theirs: Path) -> int:
    token = image_token_id(read_config(config_path(theirs)))
    return 151667 if token is None else int(token)


class _Sample:
    """Random words, one run of image tokens for each image, random tiles."""

    def __init__(
        self, architecture: Architecture, sizes: tuple[tuple[float, float], ...], image_token: int, seed: int
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.grids: list[Grid] = []
        self.starts: list[int] = []
        if architecture.vision.native:
            self._at_native_resolution(architecture, architecture.vision.native, sizes, image_token, generator)
            return
        tile, per_tile = architecture.vision.image_size, architecture.image_tokens_per_tile
        self.sizes = [(round(width * tile), round(height * tile)) for width, height in sizes]
        self.images: list[tuple[int, FeatureOrder]] = []
        ids, tiles = [self._words(architecture, image_token, generator)], 0
        rule = architecture.prompt.tiling if architecture.newline else "fixed"
        for size in self.sizes:
            tiling = Tiling(tile, 1, len(ANYRES_MAX_GRIDS), architecture.newline, rule)
            self.starts.append(sum(map(len, ids)))
            image = tile_image("", size, len(self.sizes), tiling)
            order = feature_order(image, rule, per_tile)
            self.images.append((image.tiles * per_tile, order))
            tiles += image.tiles
            ids += [torch.full((len(order),), image_token), self._words(architecture, image_token, generator)]
        self.ids = torch.cat(ids)
        self.pixels = torch.randn(tiles, 3, tile, tile, generator=generator)

    def _at_native_resolution(
        self,
        architecture: Architecture,
        native: NativeResolution,
        sizes: tuple[tuple[float, float], ...],
        image_token: int,
        generator: torch.Generator,
    ) -> None:
        """Images of as many patches as others have tiles, three squares a tile."""
        squares = [tuple(max(1, round(3 * side)) for side in size) for size in sizes]
        self.grids = [(1, rows * native.merge, columns * native.merge) for columns, rows in squares]
        self.sizes = [(columns, rows) for _, rows, columns in self.grids]
        self.images = [(columns * rows, FeatureOrder(np.arange(columns * rows))) for columns, rows in squares]
        ids = [self._words(architecture, image_token, generator)]
        for tokens, _ in self.images:
            self.starts.append(sum(map(len, ids)))
            ids += [torch.full((tokens,), image_token), self._words(architecture, image_token, generator)]
        self.ids = torch.cat(ids)
        patches, size = sum(rows * columns for _, rows, columns in self.grids), architecture.vision.patch_size
        self.pixels = torch.randn(patches, 3, size, size, generator=generator)

    @staticmethod
    def _words(architecture: Architecture, image_token: int, generator: torch.Generator) -> Tensor:
        words = torch.randint(0, architecture.language.vocab_size - 1, (WORDS,), generator=generator)
        return words + (words >= image_token).long()  # all but the image token


def _our_logits(
    ours: Path, theirs: Path, architecture: Architecture, samples: list[_Sample], image_token: int
) -> tuple[Tensor, ...]:
    flags = ["--load", str(ours), "--no-load-optim", "--no-load-rng", "--exit-on-missing-checkpoint"]
    flags += Adapters.from_record(OurCheckpoint(ours).run.get("adapters")).flags
    platform.multiply_exactly()
    with single_process(str(theirs), [*flags, "--ckpt-format", "torch_dist"]) as inputs, torch.no_grad():
        chain = Chain.of(inputs.args, architecture)
        stage = Stage(chain, 0, len(chain.kinds)).cuda()
        load_checkpoint([stage], None, None)
        logits = stage.eval()(_pack(samples, image_token)).cpu()
    return logits[:, : architecture.language.vocab_size].float().split([len(sample.ids) for sample in samples])


def _pack(samples: list[_Sample], image_token: int) -> Microbatch:
    ids = torch.cat([sample.ids for sample in samples])
    begins = np.cumsum([0, *(len(sample.ids) for sample in samples)]).tolist()
    orders = order_tensors(image for sample in samples for image in sample.images)
    return Microbatch(
        tiles=sum(len(sample.pixels) for sample in samples),
        lengths=tuple(len(sample.ids) for sample in samples),
        samples=len(samples),
        useful_tokens=len(ids),
        pixels=torch.cat([sample.pixels for sample in samples]).to("cuda"),
        input_ids=ids.to("cuda"),
        image_positions=(ids == image_token).nonzero().squeeze(1).to("cuda"),
        **{name: tensor.to("cuda") for name, tensor in orders.items()},
        grids=tuple(grid for sample in samples for grid in sample.grids),
        image_starts=tuple(
            begin + start for begin, sample in zip(begins, samples, strict=False) for start in sample.starts
        ),
    )


@torch.no_grad()
def _their_logits(theirs: Path, samples: list[_Sample], peft: Path | None) -> list[Tensor]:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(theirs, dtype=torch.float32).eval()
    if peft:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, peft, torch_device="cpu").merge_and_unload()
    found = []
    for sample in samples:
        images: dict[str, Tensor] = {}
        if sample.grids:
            frames = (
                model.config.vision_config.temporal_patch_size
            )  # a patch is a film of equal frames, colour by colour
            images["pixel_values"] = sample.pixels.unsqueeze(2).expand(-1, -1, frames, -1, -1).flatten(1)
            images["image_grid_thw"] = torch.tensor(sample.grids)
            images["mm_token_type_ids"] = (sample.ids == model.config.image_token_id).long()[None]
        elif sample.sizes:
            images["pixel_values"] = sample.pixels
            if model.config.model_type == "gemma3":
                images["token_type_ids"] = (sample.ids == model.config.image_token_id).long()[None]
            if model.config.model_type in ("llava_next", "llava_onevision"):
                images["image_sizes"] = torch.tensor([(height, width) for width, height in sample.sizes])
            if model.config.model_type == "llava_onevision":
                images["batch_num_images"] = torch.tensor([len(sample.sizes)])
        found.append(model(input_ids=sample.ids[None], **images).logits[0])
    return found
