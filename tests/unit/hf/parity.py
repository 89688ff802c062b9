"""Run as a program on one or several tensor-parallel ranks: families against transformers, a pack against its samples.

parity.py FAMILY...

Prints, for each family, the largest difference of logits and loss, and of gradients relative to each weight's largest;
and whether the weights that Megatron saves go back to Hugging Face bit by bit.
"""

import json
import os
import queue
import re
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.training.checkpointing import load_checkpoint, save_checkpoint
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from megatron.vlm.checkpoint.integrity import seal_by_one_process
from megatron.vlm.data.media.tiles import Tiling, tile_image
from megatron.vlm.defaults import preset_defaults
from megatron.vlm.hf.convert import KeyMap, from_hugging_face, to_hugging_face
from megatron.vlm.hf.folder import WeightFolder
from megatron.vlm.hf.names import table_name
from megatron.vlm.hf.pack_inputs import padded_sounds
from megatron.vlm.media import Images, Media, together
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain, configs_of
from megatron.vlm.models.configs import language_config
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.single import single_process
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.presets import preset
from omnibal_ext.families.media import TILINGS
from omnibal_ext.families.registry import family_of
from omnibal_ext.modalities.audio.architecture import AudioArchitecture
from omnibal_ext.modalities.film.architecture import FilmArchitecture
from omnibal_ext.modalities.vision.architecture import NativeResolution
from omnibal_ext.modalities.vision.features import FeatureOrder, joined_orders
from omnibal_ext.plan import single_stage_plan
from tests.engine.names import weights_by_checkpoint_name
from tests.media import audio_of, with_images
from tests.unit.hf import models
from tests.unit.hf.models import AUDIO_START, AUDIO_TOKEN, IMAGE_TOKEN, SIDE, VIDEO_TOKEN, VISION_START, Sample, Shown

NOT_TRAINED = (".scalar", ".shift", "projector.scale", "expert_bias", ".ranges")
"""Ends of the names of numbers beside the weights (Gemma 4)."""
TOWERS = ("vision_tower", "visual", "vision_model", "audio_tower", "image_tower", "video_tower")
"""What transformers' models call their encoders."""
JOINTS = r"^(visual\.(merger|(deepstack_)?merger_list|downsample)|audio_tower\.(ln_post|proj\d?))\."
"""In their names as in the tables: what joins an encoder to the language model, where it lies in its module."""
TIMED = {
    "qwen2_5_vl": "second_per_grid_ts", "qwen2_5_omni_thinker": "video_second_per_grid",
    "qwen3_omni_moe_thinker": "video_second_per_grid",
}  # fmt: skip
"""What transformers' models call the seconds between a video's steps."""
CLASSES = [models.classes(family) for family in models.FAMILIES]
"""Looked up here, where the fork server imports what they need for all ranks."""
# Several images, one image, none, one again, one of many tiles: wide, high, square and small ones.
IMAGES = [[(50, 20), (16, 40)], [(33, 31)], [], [(100, 9)], [(90, 61)]]
# At native resolution, rows and columns of squares: some fill windows of two, one is a single row, one a square.
NATIVE_IMAGES = [[(3, 5), (1, 4)], [(1, 1)], [], [(2, 2), (7, 3)]]
# Without an image of one square alone, at which transformers' Mistral 3 fails.
PICTURES = [[(3, 5), (1, 4)], [(1, 2)], [], [(2, 2), (7, 3)]]
# The same with videos: steps, rows, columns, and the seconds between steps; two behind each other, one between images.
VIDEOS = [[(3, 5), (4, 1, 3, 0.4)], [(1, 1)], [], [(2, 2), (2, 3, 3, 1.3), (3, 2, 1, 0.75), (1, 2)]]

# Mel frames of what is heard in front of a sample's images and behind them: parts of chunks, whole ones, an odd row,
# one that is shorter than a chunk and alone.
SOUNDS = [([30], [101]), ([], [7, 212]), ([333], []), ([], [41])]
# Videos behind a sample's images, and frames of each, where these have an encoder of their own.
FILMS = [(1, 3), (0, 0), (2, 3), (3, 3), (0, 0)]
# Of models that take images or videos in a sample, not both.
VIDEOS_APART = [[(3, 5), (1, 4)], [(4, 1, 3, 0.4)], [(1, 1)], [], [(2, 3, 3, 1.3), (3, 2, 1, 0.75)], [(2, 2), (7, 3)]]


def compare_all(compare: Callable[[str, Path, Namespace], dict[str, float]]) -> None:
    """Print the largest of all ranks of what is found of each family that the command names."""
    ranks = int(os.environ["WORLD_SIZE"])
    result = {}
    filesystem_async._results_queue = queue.SimpleQueue()  # as the trainer has it; core starts a process for its own
    flags = ["--tensor-model-parallel-size", str(ranks), "--ckpt-format", "torch_dist"]
    with single_process("tiny", [*flags, "--no-gradient-accumulation-fusion"]) as inputs:
        folders: list[str] = [tempfile.mkdtemp()]
        torch.distributed.broadcast_object_list(folders)
        for number, family in enumerate(sys.argv[1:]):
            found = compare(family, Path(folders[0]) / str(number), inputs.args)
            everywhere: list[dict[str, float]] = [{} for _ in range(ranks)]
            torch.distributed.all_gather_object(everywhere, found)
            result[family] = {name: max(rank[name] for rank in everywhere) for name in found}
    if os.environ["RANK"] == "0":
        shutil.rmtree(folders[0])
        print("RESULT " + json.dumps(result))


def compare(family: str, folder: Path, args: Namespace) -> dict[str, float]:
    theirs = models.build(family, seed=1)
    if torch.distributed.get_rank() == 0:
        theirs.save_pretrained(folder / "theirs", max_shard_size="60KB")
        from_hugging_face(folder / "theirs", folder / "ours")
    torch.distributed.barrier()
    keys = KeyMap.of(folder / "theirs", WeightFolder(folder / "theirs").stored)
    architecture = preset(str(folder / "ours"))
    stage = load(architecture, folder / "ours", args)
    batch, samples = packed(architecture)
    expected_logits, expected_loss = reference(theirs, samples)
    logits, loss = computed(stage, batch)
    return {
        "logits": (logits - expected_logits).abs().max().item(), "loss": abs(loss - expected_loss),
        "gradients": gradient_difference(stage, theirs, keys), "scale": expected_logits.abs().max().item(),
        "bits lost": float(torch.distributed.get_world_size() > 1 and bits_lost(stage, folder, args)),
        "frozen otherwise": float(len(frozen_otherwise(stage.chain, theirs, keys))),
    }  # fmt: skip


def computed(stage: Stage, batch: Microbatch) -> tuple[Tensor, float]:
    """Logits of the pack's tokens, and the mean loss, whose gradients weights have then."""
    batch, tokens = padded(batch, torch.distributed.get_world_size()), batch.tokens
    with torch.no_grad():
        logits = gather_from_tensor_model_parallel_region(stage(replace(batch, labels=None)))
    loss = (stage(batch) * batch.loss_mask).sum() / batch.loss_mask.sum()
    loss.backward()
    return logits[:tokens, : models.VOCABULARY], loss.item()


def frozen_otherwise(chain: Chain, theirs: torch.nn.Module, keys: KeyMap) -> set[str]:
    """Weights that our `--freeze vit` trains, and who freezes transformers' vision tower does not, or the other way; of
    the projector's layer those that `--freeze projector` treats otherwise."""
    towers = [tower for name in TOWERS if (tower := getattr(theirs.model, name, None)) is not None]
    if not towers:
        return set()  # there is no ViT
    named = partial(table_name, family=family_of(keys.architecture))
    of_tower = {id(weight) for tower in towers for weight in tower.parameters()}
    of_tower = {named(name) for name, weight in theirs.named_parameters() if id(weight) in of_tower}
    there = {name for name, source in keys.sources.items() for part in map(named, source.theirs)
             if part in of_tower and not re.search(JOINTS, part)}  # fmt: skip
    joint = {name for name in keys.sources if name.startswith(("links.projector.", "links.audio_projector."))} - there
    wrong = set()
    for part, wanted in (("vit", there), ("projector", joint)):
        frozen = replace(chain, frozen=(part,))
        weights = weights_by_checkpoint_name(Stage(frozen, 0, len(chain.kinds)))
        wrong |= {name for name, weight in weights if weight.requires_grad == (name in wanted)}
    return {name for name in wrong if not name.endswith(NOT_TRAINED)}


def load(architecture: Architecture, folder: Path, args: Namespace, **chain_fields: Any) -> Stage:
    """Our model, its weights read by Megatron from the converted checkpoint."""
    plan = single_stage_plan(architecture.chain, model=architecture.name, model_hash=architecture.hash)
    values = {**vars(args), **preset_defaults(architecture, plan, args)}
    values["sequence_parallel"] = args.tensor_model_parallel_size > 1 and architecture.language.experts is not None
    language = language_config(Namespace(**values), architecture)
    chain = Chain(architecture, configs_of(language, architecture), 256, 3, **chain_fields)
    stage = Stage(chain, 0, len(chain.kinds))
    args.load, args.exit_on_missing_checkpoint = str(folder), True
    load_checkpoint([stage], None, None)
    return stage


def packed(architecture: Architecture) -> tuple[Microbatch, list[Sample]]:
    """All samples in one pack, and each alone."""
    if architecture.vision.native:
        still = architecture.tied or architecture.vision.native.frames == 1
        usual = NATIVE_IMAGES if still else VIDEOS
        shown = {"gated": VIDEOS_APART, "matrix": PICTURES}.get(architecture.merger, usual)
        apart, audio = architecture.merger == "gated", audio_of(architecture)
        return packed_at_native_resolution(architecture.vision.native, shown, apart, audio)
    rule, per_tile = architecture.prompt.tiling if architecture.newline else "fixed", architecture.image_tokens_per_tile
    tiling, shown = Tiling(architecture.vision.image_size, 1, 36, architecture.newline, rule), {}
    for images in IMAGES:
        among = len(images) if rule == "anyres_max_9" else 1
        shown |= {size: tile_image("", size, among, tiling) for size in images}
    orders = {size: TILINGS[rule].order(image, per_tile) for size, image in shown.items()}
    counts = {size: (len(orders[size]), shown[size].tiles) for size in shown}
    samples = models.samples(counts, IMAGES, architecture.vision.image_size)
    order = joined_orders((shown[size].tiles * per_tile, orders[size]) for images in IMAGES for size in images)
    if films := [one for one in architecture.further if isinstance(one, FilmArchitecture)]:
        samples = [_with_films(sample, *how, films[0]) for sample, how in zip(samples, FILMS, strict=True)]
    batch = batch_of(samples, order)
    if films:
        batch = with_films(batch, samples)
    if any(one.sees_images for one in architecture.language.attentions):
        batch = with_images(batch, starts=tuple(starts_of(Images.of(batch).positions, per_tile)))
    if any(one.sees_prefix for one in architecture.language.attentions):
        batch = replace(batch, prefixes=tuple(map(prefix_of, samples)))
    return batch, samples


def prefix_of(sample: Sample) -> int:
    return len(sample.ids) - 3


def starts_of(image_positions: Tensor, per_tile: int) -> list[int]:
    return image_positions[::per_tile].tolist()


def batch_of(samples: list[Sample], order: FeatureOrder) -> Microbatch:
    """All samples end to end; image tokens are the features `order`."""
    ids = torch.cat([sample.ids for sample in samples])
    images = Images(
        pieces=together(sum(len(sample.pixels) for sample in samples)),
        values=torch.cat([sample.pixels for sample in samples]),
        positions=(ids == IMAGE_TOKEN).nonzero().squeeze(1),
        sources=torch.from_numpy(order.sources),
        weights=None if order.weights is None else torch.from_numpy(order.weights),
    )
    return Microbatch(
        lengths=tuple(len(sample.ids) for sample in samples),
        samples=len(samples),
        useful_tokens=len(ids),
        media={"tiles": images},
        input_ids=ids,
        labels=torch.roll(ids, -1),
        loss_mask=torch.cat([torch.arange(len(sample.ids), 0, -1) > 1 for sample in samples]).float(),
    )


def padded(batch: Microbatch, multiple: int) -> Microbatch:
    """The same with words behind the last sample that count for nothing."""
    filler = -batch.tokens % multiple
    if not filler:
        return batch
    rows = {name: getattr(batch, name) for name in ("input_ids", "labels", "loss_mask")}
    longer = {name: torch.cat([row, row.new_zeros(filler)]) for name, row in rows.items()}
    return replace(batch, lengths=(*batch.lengths, filler), **longer)


def packed_at_native_resolution(
    native: NativeResolution, per_sample: Sequence[Sequence[tuple[float, ...]]], apart: bool,
    audio: AudioArchitecture | None,
) -> tuple[Microbatch, list[Sample]]:  # fmt: skip
    """The same of images and videos of the sizes given, in squares. Between a video's steps Qwen3-VL has words, and so
    have models that are told `apart`. Models that hear get `SOUNDS`, in front of a sample's images and behind them."""
    generator, samples, places, begin = torch.Generator().manual_seed(5), [], [], 0
    apart |= native.learned_positions is not None and native.clock is None
    filmed = any(len(size) == 4 for sizes in per_sample for size in sizes)
    for number, sizes in enumerate(per_sample):
        shown = tuple(_shown(size, native.merge) for size in sizes)
        words = partial(torch.randint, 0, AUDIO_START if audio else VIDEO_TOKEN, generator=generator)
        before, after = (_heard(frames, audio, words) for frames in SOUNDS[number]) if audio else ([], [])
        pieces = [words((3 + number,)), *(piece for _, *rest in before for piece in rest)]
        for item in shown:
            steps, rows, columns = item.grid
            token = IMAGE_TOKEN if item.seconds is None else VIDEO_TOKEN
            for _ in range(steps if apart else 1):
                pieces[-1][-1] = VISION_START
                grid = (1 if apart else steps, rows, columns)
                places.append((begin + sum(map(len, pieces)), grid, item.seconds or 1.0))
                pieces.append(torch.full((grid[0] * rows * columns // native.merge**2,), token))
                pieces.append(words((4,)))
        pixels = [torch.empty(0, 3, *[2][:filmed], SIDE, SIDE), *(_patches(item, filmed, generator) for item in shown)]
        pieces += [piece for _, *rest in after for piece in rest]
        sounds = tuple(mels for mels, *_ in [*before, *after])
        samples.append(Sample(torch.cat(pieces), torch.cat(pixels), (), shown, sounds))
        begin += len(samples[-1].ids)
    tokens = sum(len(sample.pixels) for sample in samples) // native.merge**2
    starts, grids, seconds = (tuple(column) for column in zip(*places, strict=True))
    batch = batch_of(samples, FeatureOrder(np.arange(tokens)))
    ids = torch.cat([sample.ids for sample in samples])
    positions = ((ids == IMAGE_TOKEN) | (ids == VIDEO_TOKEN)).nonzero().squeeze(1)
    times = seconds if filmed else ()
    batch = with_images(batch, positions=positions, grids=grids, starts=starts, seconds=times)
    return (with_sounds(batch, samples) if audio else batch), samples


def _heard(frames: Sequence[int], audio: AudioArchitecture, words: Callable[..., Tensor]) -> list[list[Tensor]]:
    """Of sounds of so many frames: mel frames, their tokens, words behind."""
    return [
        [torch.randn(one, audio.mel_bins, generator=torch.Generator().manual_seed(one)),
         torch.tensor([AUDIO_START, *[AUDIO_TOKEN] * audio.tokens(one)]), words((3,))]
        for one in frames
    ]  # fmt: skip


def with_sounds(batch: Microbatch, samples: Sequence[Sample]) -> Microbatch:
    sounds = Media(
        pieces=tuple(tuple(map(len, sample.sounds)) for sample in samples),
        values=torch.cat([mels for sample in samples for mels in sample.sounds]),
        positions=(batch.input_ids == AUDIO_TOKEN).nonzero().squeeze(1),
    )
    return replace(batch, media={**batch.media, "frames": sounds})


def _with_films(sample: Sample, videos: int, frames: int, film: FilmArchitecture) -> Sample:
    """The sample with so many videos behind it, and a word behind each."""
    ids, side = sample.ids.masked_fill(sample.ids == VIDEO_TOKEN, 0), film.image_size
    parts = [torch.tensor([*[VIDEO_TOKEN] * film.encoder.tokens(frames), number]) for number in range(videos)]
    pixels = torch.randn(videos, frames, 3, side, side, generator=torch.Generator().manual_seed(len(ids)))
    return replace(sample, ids=torch.cat([ids, *parts]), films=pixels)


def with_films(batch: Microbatch, samples: Sequence[Sample]) -> Microbatch:
    films = [film for sample in samples if sample.films is not None for film in sample.films]
    read = Images(
        pieces=tuple((len(film),) for film in films),
        values=torch.cat(films),
        positions=(batch.input_ids == VIDEO_TOKEN).nonzero().squeeze(1),
    )
    return replace(batch, media={**batch.media, "stills": read})


def _shown(size: tuple[float, ...], merge: int) -> Shown:
    steps, rows, columns, *seconds = (1, *size) if len(size) == 2 else size
    return Shown((int(steps), int(rows) * merge, int(columns) * merge), *seconds)


def _patches(item: Shown, filmed: bool, generator: torch.Generator) -> Tensor:
    """Of a video two frames each; of an image two equal ones where the pack has videos, else one."""
    if item.seconds is not None:
        return torch.randn(item.patches, 3, 2, SIDE, SIDE, generator=generator)
    patches = torch.randn(item.patches, 3, SIDE, SIDE, generator=generator)
    return patches.unsqueeze(2).expand(-1, -1, 2, -1, -1) if filmed else patches


def reference(theirs: torch.nn.Module, samples: list[Sample]) -> tuple[Tensor, float]:
    """Logits of transformers, sample by sample, and its gradients of the mean loss over all tokens."""
    count = sum(len(sample.ids) - 1 for sample in samples)
    logits, total = [], 0.0
    for sample in samples:
        ids = sample.ids
        if theirs.config.model_type.startswith("glm"):  # whose videos have the images' token
            ids = ids.masked_fill(ids == VIDEO_TOKEN, IMAGE_TOKEN)
        _forget_longer_samples(theirs)
        given = seen(sample, theirs.config) | padded_sounds(sample.sounds)
        out = theirs(input_ids=ids[None], **given).logits[0]
        loss = cross_entropy(out[:-1], sample.ids[1:], reduction="sum") / count
        loss.backward()
        logits.append(out.detach())
        total += loss.item()
    return torch.cat(logits), total


def seen(sample: Sample, config: Any) -> dict[str, Tensor]:
    """A sample's images as the model's processor makes them, and what it says of its words."""
    kind = config.model_type
    if kind == "gemma4" and sample.shown:
        return _with_positions(sample, config.vision_config.pooling_kernel_size)
    if kind == "gemma4_unified" and sample.shown:
        return _with_positions(sample, 1, half=False)
    if sample.shown:
        ways = {"mistral3": _whole_pictures, "lighton_ocr": _whole_pictures, "paddleocr_vl": _row_by_row}
        return ways[kind](sample) if kind in ways else _at_native_resolution(sample, kind)
    images: dict[str, Tensor] = {}
    if sample.films is not None and len(sample.films):
        images["pixel_values_videos"] = sample.films
    if len(sample.pixels):
        images["pixel_values"] = sample.pixels[None] if kind in ("idefics3", "smolvlm") else sample.pixels
        if kind == "gemma3":
            images["token_type_ids"] = (sample.ids == IMAGE_TOKEN).long()[None]
        if kind in ("llava_next", "llava_next_video", "llava_onevision"):
            images["image_sizes"] = torch.tensor([(height, width) for width, height in sample.sizes])
        if kind == "llava_onevision":
            images["batch_num_images"] = torch.tensor([len(sample.sizes)])
    if kind == "paligemma":
        images["token_type_ids"] = (torch.arange(len(sample.ids)) >= prefix_of(sample)).long()[None]
    return images


def _forget_longer_samples(theirs: torch.nn.Module) -> None:
    """Transformers' dynamic rotation keeps the waves of the longest sample that it saw, for shorter ones behind it."""
    for module in theirs.modules():
        if getattr(module, "rope_type", None) == "dynamic":
            module.max_seq_len_cached = module.original_max_seq_len
            module.register_buffer("inv_freq", module.original_inv_freq.clone(), persistent=False)


def _at_native_resolution(sample: Sample, kind: str) -> dict[str, Tensor]:
    """What transformers' processors make of images and videos: patches apart by kind, two frames each."""
    films = sample.pixels if sample.pixels.dim() == 5 else sample.pixels.unsqueeze(2).expand(-1, -1, 2, -1, -1)
    patches = films.flatten(1).split([item.patches for item in sample.shown])
    kinds = (sample.ids == IMAGE_TOKEN) + 2 * (sample.ids == VIDEO_TOKEN)
    given = {"mm_token_type_ids": kinds.long()[None]}
    for name, values, video in (("image", "pixel_values", False), ("video", "pixel_values_videos", True)):
        chosen = [number for number, item in enumerate(sample.shown) if (item.seconds is not None) is video]
        if chosen:
            given[values] = torch.cat([patches[number] for number in chosen])
            given[f"{name}_grid_thw"] = torch.tensor([sample.shown[number].grid for number in chosen])
            if video and kind in TIMED:
                given[TIMED[kind]] = torch.tensor([sample.shown[number].seconds for number in chosen])
    if "omni" in kind:  # without a mask it makes no positions
        given["attention_mask"] = torch.ones_like(sample.ids)[None]
    return given


def _row_by_row(sample: Sample) -> dict[str, Tensor]:
    """What PaddleOCR-VL's processor makes of images: patches in the order of rows, not of squares."""
    found = []
    for item, patches in zip(sample.shown, sample.pixels.split([item.patches for item in sample.shown]), strict=True):
        _, rows, columns = item.grid
        squares = patches.view(rows // 2, columns // 2, 2, 2, 3, SIDE, SIDE)
        found.append(squares.transpose(1, 2).reshape(-1, 3, SIDE, SIDE))
    of_image, grids = (sample.ids == IMAGE_TOKEN).long()[None], torch.tensor([item.grid for item in sample.shown])
    return {"pixel_values": torch.cat(found), "image_grid_thw": grids, "mm_token_type_ids": of_image}


def _with_positions(sample: Sample, square: int, half: bool = True) -> dict[str, Tensor]:
    """What Gemma 4's processor makes of images: patches, colours last, and where they are, column first; filled up to
    those of the largest. `half`: from 0 to 1 what is ours from -1 to 1."""
    most = max(item.patches for item in sample.shown)
    pixels, places = torch.zeros(len(sample.shown), most, 3 * SIDE**2), torch.full((len(sample.shown), most, 2), -1)
    for number, patches in enumerate(sample.pixels.split([item.patches for item in sample.shown])):
        _, rows, columns = sample.shown[number].grid
        squares = product(range(0, rows, square), range(0, columns, square))
        of_patches = [(x + b, y + a) for y, x in squares for a, b in product(range(square), range(square))]
        pixels[number, : len(patches)] = patches.permute(0, 2, 3, 1).flatten(1) / (1 + half) + half / 2
        places[number, : len(patches)] = torch.tensor(of_patches)
    of_image = (sample.ids == IMAGE_TOKEN).long()[None]
    return {"pixel_values": pixels, "image_position_ids": places, "mm_token_type_ids": of_image}


def _whole_pictures(sample: Sample) -> dict[str, Tensor]:
    """The images put together from squares of patches, in one tensor, filled up to the largest: what Pixtral's
    processor makes."""
    pictures = []
    for item, patches in zip(sample.shown, sample.pixels.split([item.patches for item in sample.shown]), strict=True):
        down, across = (side // 2 for side in item.grid[1:])
        squares = patches.view(down, across, 2, 2, 3, SIDE, SIDE).permute(4, 0, 2, 5, 1, 3, 6)
        pictures.append(squares.reshape(3, 2 * down * SIDE, 2 * across * SIDE))
    sizes = torch.tensor([picture.shape[1:] for picture in pictures])
    height, width = sizes.amax(0).tolist()
    filled = [pad(one, (0, width - one.shape[2], 0, height - one.shape[1])) for one in pictures]
    return {"pixel_values": torch.stack(filled), "image_sizes": sizes}


def gradient_difference(stage: Stage, theirs: torch.nn.Module, keys: KeyMap) -> float:
    """Largest difference over all weights, theirs brought to our form by the converter's map and cut as ours are."""
    named = partial(table_name, family=family_of(keys.architecture))
    expected = {named(name): weight.grad for name, weight in theirs.named_parameters() if weight.grad is not None}
    mine = {name: one for name, one in weights_by_checkpoint_name(stage) if not name.endswith(NOT_TRAINED)}
    worst = 0.0
    for name, whole in wanted_gradients(expected, keys):
        weight = mine.pop(name)
        difference, padding = compared_gradient(name, weight, whole)
        worst = max(worst, difference)
        assert "self_attention" not in name or not weight[padding].any(), f"{name}: heads that fill up are not zero"
    assert not mine, f"weights of ours that come from nowhere: {list(mine)}"
    assert not expected, f"weights of theirs with a gradient that we lack: {list(expected)}"
    return worst


def compared_gradient(name: str, weight: Tensor, whole: Tensor) -> tuple[float, Tensor]:
    """How far a weight's gradient is from the whole one, of whose largest; and which of its numbers fill up ranks."""
    assert weight.grad is not None, name
    if getattr(weight, "sequence_parallel", False):  # each rank has that of its tokens
        torch.distributed.all_reduce(weight.grad)
    padding = local_part(torch.ones_like(whole), weight) == 0
    assert not weight.grad[padding].any(), f"{name}: what fills up the ranks has a gradient"
    return ((weight.grad - local_part(whole, weight)).abs().max() / whole.abs().max()).item(), padding


def wanted_gradients(expected: dict[str, Tensor], keys: KeyMap) -> Iterator[tuple[str, Tensor]]:
    """Theirs in our form, by the names of our modules, taken out of `expected`."""
    named = partial(table_name, family=family_of(keys.architecture))
    for name, source in keys.sources.items():
        if name.endswith(NOT_TRAINED):
            assert not any(named(part) in expected for part in source.theirs)
            continue
        if ".experts." not in name:
            more_to_come = source.chunk is not None and source.chunk.number + 1 < source.chunk.count
            take = expected.__getitem__ if more_to_come else expected.pop
            yield name, keys.join(name, (take(named(part)) for part in source.theirs))
            continue
        layer, kind = named(source.theirs[0]).partition(".experts.")[0], name.split(".")[-2]
        # In memory theirs are fused, however they are stored.
        fused = expected.pop(f"{layer}.experts.{'gate_up_proj' if kind == 'linear_fc1' else 'down_proj'}")
        yield name.replace(".experts.experts.", ".experts."), fused


def local_part(whole: Tensor, weight: Tensor) -> Tensor:
    """This rank's part of a whole tensor, filled up with zeros and cut as the weight is."""
    dim = getattr(weight, "partition_dim", -1)
    if dim < 0:
        return whole
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    missing = weight.shape[dim] * ranks - whole.shape[dim]
    filled = torch.cat([whole, whole.new_zeros([missing if d == dim else n for d, n in enumerate(whole.shape)])], dim)
    return torch.cat(filled.chunk(ranks * weight.partition_stride, dim)[rank::ranks], dim)


def save(stage: Stage, folder: Path, args: Namespace, **common: Any) -> None:
    """As the trainer does; `common` is noted beside the weights."""
    args.save, args.no_save_optim, args.no_save_rng = str(folder / "saved"), True, True
    save_checkpoint(1, [stage], None, None, 0)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        seal_by_one_process(folder / "saved/iter_0000001", common)
    torch.distributed.barrier()


def bits_lost(stage: Stage, folder: Path, args: Namespace) -> bool:
    """Whether a weight that Megatron saved from these ranks comes back to Hugging Face with another bit or name."""
    save(stage, folder, args)
    if torch.distributed.get_rank():
        return False
    to_hugging_face(folder / "saved", folder / "back", like=folder / "theirs")
    before, after = WeightFolder(folder / "theirs"), WeightFolder(folder / "back")
    return before.stored != after.stored or not all(
        torch.equal(*(side.tensor(name).flatten().view(torch.uint8) for side in (before, after)))
        for name in after.stored
    )


if __name__ == "__main__":
    compare_all(compare)
