"""What the programs under torchrun share: a small model, packs of every kind, and one iteration of any plan."""

import io
import json
import pickle
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training import get_args
from megatron.training.initialize import initialize_megatron
from megatron.training.training import get_model
from torch import Tensor
from torch.distributed import distributed_c10d

from megatron.vlm.arguments import parse_arguments
from megatron.vlm.data.loader import Needs
from megatron.vlm.defaults import expert_defaults
from megatron.vlm.loss import token_loss, weigh_samples
from megatron.vlm.media import Images, Media, together
from megatron.vlm.microbatch import Microbatch, segment_ids
from megatron.vlm.models.adapters import adapters_in
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.communicator import Communicator
from megatron.vlm.pipeline.executor import Executor
from megatron.vlm.pipeline.executor import open_channels as open_channels_along
from megatron.vlm.pipeline.stage import Stage, stage_number
from megatron.vlm.pipeline.tied import embedding_ranks
from megatron.vlm.pipeline.tower import owned_layers
from megatron.vlm.platform import CPU
from omnibal_ext.adapters import NO_ADAPTERS, Adapters
from omnibal_ext.architectures import presets
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.audio.architecture import AudioArchitecture
from omnibal_ext.modalities.encoder import EncoderArchitecture
from omnibal_ext.modalities.film.architecture import FilmArchitecture
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.experts import Experts
from omnibal_ext.modalities.language.layer import Attention, Layer, LayerInputs
from omnibal_ext.modalities.language.linear_attention import LinearAttention
from omnibal_ext.modalities.language.rope import Rope, RopeScaling
from omnibal_ext.modalities.modality import LANGUAGE
from omnibal_ext.modalities.vision.architecture import NativeResolution, VisionArchitecture
from omnibal_ext.plan import Plan
from omnibal_ext.schedules.actions import Schedule
from omnibal_ext.schedules.placement import Placement
from tests.distributed.cases import Question
from tests.engine.names import weights_by_checkpoint_name
from tests.languages import altered
from tests.media import with_images

SMALL = Architecture(
    "small",
    VisionArchitecture(layers=4, hidden_size=32, heads=4, ffn_hidden_size=64, patch_size=4, image_size=16),
    LanguageArchitecture((Layer(Attention(4, 2, 12, Rope(1e4)), 96),) * 4, hidden_size=48, vocab_size=128),
)
DROPPING = replace(SMALL, name="dropping", vision=replace(SMALL.vision, drop_path=0.5))
"""Tiles pass branches of the ViT's layers by."""
WIDE_NORM = replace(
    SMALL,
    name="wide_norm",
    vision=replace(
        SMALL.vision, normalization="RMSNorm", qkv_bias=False, qk_norm=True, feature_layers=(0, 2),
        side_by_side=(2, 0, 1),
    ),
    language=altered(SMALL.language, qk_norm=True, head_dim=16),
)  # fmt: skip
"""QK-norm over the ViT's full width and over each of the language model's heads, as InternVL3.5-38B; and what three of
the ViT's layers give stands side by side, as in ViP-LLaVA."""
TIED = replace(SMALL, name="tied", tied=True)
NATIVE = replace(
    SMALL,
    name="native",
    vision=VisionArchitecture(
        layers=4, hidden_size=32, heads=4, ffn_hidden_size=40, patch_size=2, image_size=2, normalization="RMSNorm",
        activation="silu", gated=True, patch_bias=False, layer_scale=False,
        native=NativeResolution(window=2, full_layers=(1,), positions_per_second=3.0),
    ),
    language=altered(SMALL.language, sections=(2, 2, 2)),
    projector_norm=False,
)  # fmt: skip
"""Images at their own size, windows, three axes of positions, as Qwen2.5-VL."""
FEATURES = replace(
    NATIVE,
    name="features",
    vision=replace(
        NATIVE.vision, normalization="LayerNorm", activation="gelu_tanh", gated=False, patch_bias=True,
        native=NativeResolution(learned_positions=3), feature_layers=(0, 2),
    ),
    language=altered(SMALL.language, sections=(3, 2, 3), interleaved=True, qk_norm=True, head_dim=16),
)  # fmt: skip
"""Features of two of the ViT's layers enter the first two language layers, as in Qwen3-VL."""
GEMMA = replace(
    SMALL,
    name="gemma",
    vision=replace(SMALL.vision, class_token=False, layer_scale=False, final_norm=True, activation="gelu_tanh"),
    language=altered(
        altered(
            SMALL.language, qk_norm=True, head_dim=16, query_scale=20, activation="gelu_tanh", centred_norms=True,
            branch_norms=True, scaled_words=True, scaling=RopeScaling("linear", 8.0), sees_images=True,
        ),
        only=(0, 1, 3), window=3, theta=1e3, scaling=None,
    ),
    pools=True,
    tied=True,
)  # fmt: skip
"""Norms around both branches, windows in three of four layers, images seen in both directions, as in Gemma 3."""
PALIGEMMA = replace(
    GEMMA,
    name="paligemma",
    vision=replace(GEMMA.vision, patch_size=8),
    language=altered(
        GEMMA.language, qk_norm=False, kv_heads=1, scaling=None, sees_images=False, sees_prefix=True, score_cap=0.5,
        logit_cap=2.0,
    ),
    shuffle=1,
    projector_norm=False,
    pools=False,
    merger="shuffled",
)  # fmt: skip
"""Prompts seen in both directions, capped scores and logits, one matrix behind the ViT, as in PaliGemma 2."""
GEMMA_4 = replace(
    NATIVE,
    name="gemma_4",
    vision=replace(
        NATIVE.vision, activation="gelu_tanh", qkv_bias=False, bias=False, head_norms=True, branch_norms=True,
        standardized=True, clipped=True, norm_epsilon=1e-2,
        native=NativeResolution(frames=1, axis_positions=16, by_halves=True),
    ),
    language=altered(
        altered(
            altered(
                SMALL.language, qk_norm=True, value_norm=True, query_scale=16, activation="gelu_tanh",
                branch_norms=True, scaled_words=True, layer_scalar=True, logit_cap=2.0,
            ),
            only=(0, 2), window=3, theta=1e3, sees_images=True,
        ),
        only=(1, 3), kv_heads=1, head_dim=16, keys_are_values=True,
        scaling=RopeScaling("proportional", 2.0, turning=0.5),
    ),
    pools=True,
    tied=True,
)  # fmt: skip
"""Windows in every other layer; the others have wider heads in one group, whose keys are values, as in Gemma 4. Scores
are divided all the same, and norms behind the ViT's small branches have a large epsilon: else they blow rounding up."""
BOUNDS = {"linear_qkv_clip": (2.4, 0.2), "linear_proj_clip": (1.0, 0.05)}
BOUNDS |= {"linear_fc1_clip": (2.4, 0.2), "linear_fc2_clip": (0.01, 5e-4)}
"""About what its ViT's layers take and give at most: of values so far out few are so near a bound that rounding counts.
"""
GEMMA_4_MOE = replace(
    GEMMA_4,
    name="gemma_4_moe",
    vision=replace(GEMMA_4.vision, clipped=False),
    language=altered(GEMMA_4.language, ffn_hidden_size=24, experts=Experts(8, 2, balance=0.0, beside=32)),
)
"""The same with experts beside a perceptron, as Gemma 4 26B-A4B."""
GEMMA_4_INPUTS = replace(
    GEMMA_4,
    name="gemma_4_inputs",
    language=altered(
        altered(
            altered(GEMMA_4.language, layer_inputs=LayerInputs(12, 130, blank=5)),
            only=(2, 3), reads_keys=True, ffn_hidden_size=192, keys_from=0,
        ),
        only=(3,), keys_from=1,
    ),
)  # fmt: skip
"""Layers have inputs of their own, the last two wider perceptrons and the keys and values of the first two, as Gemma 4
E2B."""
LAYERLESS = replace(
    GEMMA_4,
    name="layerless",
    vision=VisionArchitecture(
        layers=0, hidden_size=32, heads=1, ffn_hidden_size=0, patch_size=2, image_size=2, norm_epsilon=1e-2,
        embedding_norms=True, native=NativeResolution(merge=1, frames=1, axis_positions=16),
    ),
    language=altered(GEMMA_4.language, sees_images=True, images_whole=True),
    shuffle=1,
    pools=False,
    merger="normed",
)  # fmt: skip
"""No ViT layers: patches enter as they are embedded, one a token; images are seen whole in all layers, as in Gemma 4
without towers."""
LINEAR = replace(
    FEATURES,
    name="linear",
    vision=replace(FEATURES.vision, feature_layers=()),
    language=altered(
        altered(
            FEATURES.language, sections=(2, 1, 1), rotated=8, norm_epsilon=1e-2, centred_norms=True, output_gate=True
        ),
        only=(0, 2, 3), mixer=LinearAttention(groups=2, heads=4, key_width=8, value_width=6, kernel=3),
    ),
)  # fmt: skip
"""Linear attention in three of four layers, gated attention that turns in part in the other, as in Qwen3.5."""
EXPERTS = replace(
    FEATURES,
    name="experts",
    language=altered(LINEAR.language, ffn_hidden_size=24, experts=Experts(8, 2, balance=0.3, shared=16)),
)
"""The same with experts, one of them shared, their routers balanced hard enough to be seen; and features."""
MIXTURE = replace(
    FEATURES,
    name="mixture",
    language=altered(FEATURES.language, ffn_hidden_size=24, experts=Experts(8, 2, balance=0.3)),
)
"""Experts behind attention in every layer, which can have adapters."""
PIXTRAL = replace(
    NATIVE,
    name="pixtral",
    vision=replace(
        NATIVE.vision, qkv_bias=False, bias=False, pre_norm=True,
        native=NativeResolution(frames=1, columns_between=True),
    ),
    language=SMALL.language,
    merger="matrix",
)  # fmt: skip
"""No biases, a norm behind the patches, a matrix that joins squares, positions in one dimension, as in Mistral 3."""
PADDLEOCR = replace(
    NATIVE,
    name="paddleocr",
    vision=replace(
        FEATURES.vision, final_norm=True, norm_epsilon=1e-2, feature_layers=(),
        native=NativeResolution(frames=1, learned_positions=3, edges_aligned=True),
    ),
    merger="two_norms",
)  # fmt: skip
"""Two norms before squares of patches are merged, as in PaddleOCR-VL."""
GLM = replace(
    NATIVE,
    name="glm",
    vision=replace(
        NATIVE.vision, qkv_bias=False, bias=False, patch_bias=True, pre_norm=True, final_norm=True,
        native=NativeResolution(learned_positions=3, bicubic=True),
    ),
    language=altered(
        altered(
            SMALL.language, head_dim=16, qkv_bias=True, sections=(1, 2, 1), rotated=8, ffn_hidden_size=24,
            experts=Experts(
                8, 4, balance=0.3, shared=16, shared_gate=False, sigmoids=True, groups=4, chosen_groups=2, scale=1.5
            ),
        ),
        only=(0, 1), experts=None, ffn_hidden_size=56,
    ),
    merger="gated",
    merger_width=40,
)  # fmt: skip
"""Two layers without experts before those with them, routers of sigmoids that choose by a bias, as in GLM-4.5V."""
HEARING = replace(
    NATIVE,
    name="hearing",
    further=(AudioArchitecture(layers=2, hidden_size=24, heads=2, ffn_hidden_size=40, mel_bins=6, chunk=8),),
)
"""An audio encoder with two convolutions over time, and pairs of its rows averaged, as in Qwen2.5-Omni."""
HEARING_FEATURES = replace(
    MIXTURE,
    name="hearing_features",
    further=(
        AudioArchitecture(
            layers=2, hidden_size=24, heads=2, ffn_hidden_size=40, mel_bins=6, chunk=16, chunks_attended=2, channels=5,
            pooled=False, key_bias=True,
        ),
    ),
)  # fmt: skip
"""One with three convolutions over time and frequency, features of the ViT and experts, as in Qwen3-Omni."""
FILMING = replace(
    SMALL,
    name="filming",
    vision=replace(SMALL.vision, patch_size=8, layer_scale=False),
    shuffle=1,
    projector_norm=False,
    further=(FilmArchitecture(layers=2, hidden_size=32, heads=4, ffn_hidden_size=40, patch_size=16, image_size=16),),
)
"""Frames of videos go through a ViT of their own, and both through one projector, as in Video-LLaVA."""
MODELS = {
    model.name: model
    for model in (
        *(SMALL, WIDE_NORM, TIED, NATIVE, FEATURES, PIXTRAL, PADDLEOCR, GLM, HEARING, HEARING_FEATURES, FILMING),
        *(GEMMA, PALIGEMMA, GEMMA_4, GEMMA_4_MOE, GEMMA_4_INPUTS, LAYERLESS, LINEAR, EXPERTS, MIXTURE),
    )
}
IMAGE_TOKEN, FURTHER_TOKEN = 127, 126


@dataclass(frozen=True)
class Result:
    """Mean loss of the global batch, and gradients by the names of the chain's layers."""

    loss: float
    gradients: dict[str, Tensor]


class Pickler(pickle.Pickler):
    """Of tensors as NumPy's arrays: torch's own way takes a tenth of a rank's time."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if type(value) is Tensor else NotImplemented


class Answers:
    """What one process answers; a rank unpickles the answers alone that it compares with."""

    def __init__(self, path: str) -> None:
        self._pickled: dict[Any, bytes] = pickle.loads(Path(path).read_bytes())

    def __getitem__(self, question: Any) -> Any:
        return pickle.loads(self._pickled[question])

    @staticmethod
    def write(path: str, answers: Mapping[Any, Any]) -> None:
        pickled = {question: io.BytesIO() for question in answers}
        for question, answer in answers.items():
            Pickler(pickled[question]).dump(answer)
        Path(path).write_bytes(pickle.dumps({question: file.getvalue() for question, file in pickled.items()}))


def start(
    architecture: Architecture, tensor: int, pipeline: int, flags: Sequence[str] = (), backend: str | None = None,
    experts: int = 1,
) -> Namespace:  # fmt: skip
    """Initialise Megatron on these ranks and return its arguments; `backend` is another than the machine's.

    `experts`: the ranks that models with experts deal them over.
    """
    presets.PRESETS.update(MODELS)
    sys.argv = ["test", "--preset", architecture.name, "--tensor-model-parallel-size", str(tensor)]
    sys.argv += [
        "--pipeline-model-parallel-size", "1", "--lr", "1e-3", "--train-iters", "1", "--global-batch-size", "24",
    ]  # fmt: skip
    sys.argv += ["--seed", "7", "--make-vocab-size-divisible-by", "16", "--no-check-for-nan-in-loss-and-grad", *flags]
    args = parse_arguments().args
    args.pipeline_model_parallel_size = pipeline
    args.data_parallel_size = args.world_size // (tensor * pipeline)
    args.expert_model_parallel_size = experts
    args.expert_tensor_parallel_size = tensor if experts == 1 else 1
    args.distributed_backend = backend or args.distributed_backend
    initialize_megatron()
    return args


PACK_KINDS: dict[str, list[tuple[list[int], list[int]]]] = {
    # tiles and tokens of each sample of each pack
    "all": [
        ([2], [9]), ([1, 1], [6, 7]), ([3, 0], [14, 5]), ([0, 0], [5, 4]), ([0], [7]), ([1, 0], [4, 1]), ([4], [20]),
        ([1, 2, 0], [8, 12, 3]),
    ],
    "text only": [([0], [7]), ([0, 0], [5, 4]), ([0], [1]), ([0, 0, 0], [3, 6, 2])],
    "image only": [([1, 1], [4, 7]), ([2], [8]), ([1], [4]), ([3], [14])],
    "one of many": [([0], [6]), ([0, 0], [3, 9]), ([1], [9]), ([0], [5])],
    "short": [([1], [6]), ([0], [3])],
}  # fmt: skip


def sample_packs(kind: str = "all", multiple: int = 1, model: str = "small") -> list[Microbatch]:
    """Packs of several images, one, none, a one-token sample, image tokens only; alike on all ranks and models.

    At native resolution the tiles of a sample are one image of as many tokens, two tiles a video where there are any.
    """
    generator = torch.Generator().manual_seed(3)
    packs = []
    for tiles, lengths in PACK_KINDS[kind]:
        pack = _pack(SMALL, tiles, lengths, multiple, generator)
        native, further = MODELS[model].vision.native, MODELS[model].further
        pack = _at_native_resolution(pack, tiles, native, generator) if native else pack
        packs.append(_with_further(pack, tiles, lengths, further[0]) if further else pack)
    return packs


def _with_further(
    pack: Microbatch, tiles: Sequence[int], lengths: Sequence[int], further: EncoderArchitecture
) -> Microbatch:
    """The pack, in which samples with four words and more have a sound, or a video, of up to four tokens, long ones
    two; they stand behind the images."""
    assert pack.input_ids is not None
    ids = pack.input_ids.where(pack.input_ids != FURTHER_TOKEN, 0)
    encoder = further.encoder
    sounds, begin = list[tuple[int, ...]](), 0
    for count, length in zip(tiles, lengths, strict=True):
        at, words, heard = begin + count * SMALL.image_tokens_per_tile, length - count * SMALL.image_tokens_per_tile, []
        for tokens in (min(4, words - 3), 2 if words > 10 else 0):
            frames = next((n for n in range(1, 99) if encoder.tokens(n) == tokens), 0) if tokens > 0 else 0
            end = at + (encoder.tokens(frames) if frames else 0)
            ids[at:end], at = FURTHER_TOKEN, end
            heard += [frames] if frames else []
        sounds, begin = [*sounds, tuple(heard)], begin + length
    generator = torch.Generator().manual_seed(sum(lengths))
    of_unit = (further.mel_bins,) if isinstance(further, AudioArchitecture) else (3, 16, 16)
    media = Media(
        pieces=tuple(sounds),
        values=torch.randn(sum(map(sum, sounds)), *of_unit, generator=generator),
        positions=(ids == FURTHER_TOKEN).nonzero().squeeze(1),
    )
    pack = replace(pack, media={**pack.media, further.modality.size: media})
    return replace(pack, input_ids=ids, labels=torch.roll(ids, -1))


def _at_native_resolution(
    pack: Microbatch, tiles: list[int], native: NativeResolution, generator: torch.Generator
) -> Microbatch:
    """An image for the tiles of each sample, two squares high and two wide for each; for two tiles as many steps, where
    the model sees films."""
    films, side = native.frames > 1, 2 * native.merge
    begins = [sum(pack.lengths[:sample]) for sample in range(len(tiles))]
    grids = {count: (2, side, side) if count == 2 and films else (1, side, side * count) for count in tiles if count}
    shown = [(begin, grids[count]) for begin, count in zip(begins, tiles, strict=True) if count]
    patches, size = sum(steps * rows * columns for _, (steps, rows, columns) in shown), NATIVE.vision.patch_size
    frames = (2,) if 2 in tiles and films else ()
    return with_images(
        pack,
        pieces=together(patches),
        values=torch.randn(patches, 3, *frames, size, size, generator=generator),
        starts=tuple(begin for begin, _ in shown),
        grids=tuple(grid for _, grid in shown),
        seconds=(0.7,) * len(shown) if frames else (),
    )


def _pack(
    architecture: Architecture, tiles: list[int], lengths: list[int], multiple: int, generator: torch.Generator
) -> Microbatch:
    size, image_tokens = architecture.vision.image_size, architecture.image_tokens_per_tile
    ids, mask = [], []
    for count, length in zip(tiles, lengths, strict=True):
        text = length - count * image_tokens
        ids.append(torch.full((count * image_tokens,), IMAGE_TOKEN))
        ids.append(torch.randint(0, IMAGE_TOKEN, (text,), generator=generator))
        mask += [0.0] * (count * image_tokens) + [1.0] * max(0, text - 1) + [0.0] * min(1, text)
    if filler := -sum(lengths) % multiple:
        ids.append(torch.zeros(filler, dtype=torch.long))
        mask += [0.0] * filler
        lengths = [*lengths, filler]
    tokens = torch.cat(ids).long()
    begins = accumulate(lengths, initial=0)
    starts = (begin + tile * image_tokens for begin, count in zip(begins, tiles, strict=False) for tile in range(count))
    images = Images(
        pieces=together(sum(tiles)),
        values=torch.randn(sum(tiles), 3, size, size, generator=generator),
        positions=(tokens == IMAGE_TOKEN).nonzero().squeeze(1),
        starts=tuple(starts),
    )
    return Microbatch(
        lengths=tuple(lengths), samples=len(tiles), useful_tokens=sum(lengths), media={"tiles": images},
        input_ids=tokens, labels=torch.roll(tokens, -1),
        supervised=torch.tensor(mask).nonzero().squeeze(1), loss_mask=torch.tensor(mask),
        targets=torch.stack([part.sum() for part in torch.tensor(mask).split(lengths)]),
        segment_ids=segment_ids(lengths),
        sources=torch.zeros(len(lengths), dtype=torch.long),
        prefixes=tuple(min(count * image_tokens + 1, length) for count, length in zip(tiles, lengths, strict=False)),
    )  # fmt: skip


def only_needed(batch: Microbatch, needs: Needs) -> Microbatch:
    """The microbatch a stage would be handed by the loader."""

    def kept(size: str, media: Media) -> Media:
        values, positions = media.values if size in needs.media else None, media.positions if needs.tokens else None
        return replace(media, values=values, positions=positions)

    return replace(
        batch, media={size: kept(size, one) for size, one in batch.media.items()},
        input_ids=batch.input_ids if needs.tokens else None, labels=batch.labels if needs.labels else None,
        supervised=batch.supervised if needs.labels else None, loss_mask=batch.loss_mask if needs.labels else None,
    )  # fmt: skip


def build_chain(
    args: Namespace, architecture: Architecture, frozen: tuple[str, ...] = (), adapted: tuple[str, ...] = ()
) -> Chain:
    """The chain that all plans of this process cut; with adapters on some parts, nothing else is trained."""
    ranks = parallel_state.get_expert_model_parallel_world_size() if architecture.language.experts else 1
    dealt = {"expert_model_parallel_size": ranks, **expert_defaults(architecture.language)}
    args = Namespace(**{**vars(args), **dealt})
    adapters = Adapters(3, 7.0, adapted) if adapted else NO_ADAPTERS
    return replace(Chain.of(args, architecture), frozen=adapters.frozen(frozen), adapters=adapters)


def chain_of(args: Namespace, question: Question) -> Chain:
    """The chain that a question is asked of."""
    return build_chain(args, MODELS[question.model], question.freeze, question.adapted)


def build_model(chain: Chain, plan: Plan) -> list[torch.nn.Module]:
    """This rank's stages of the plan, wrapped in Megatron's DDP."""

    def provide(vp_stage: int | None = None, **_: object) -> Stage:
        stage = plan.stages[stage_number(plan.placement, vp_stage)]
        own = replace(chain, configs={**chain.configs, LANGUAGE: copy(chain.language)})  # as Megatron's providers
        return stirred(
            Stage(
                own, *stage.layers, stage.recompute, stage.recompute_cheap, vp_stage, owned=owned_layers(plan, vp_stage)
            )
        )

    _regroup(chain, plan)
    model = get_model(provide, ModelType.encoder_or_decoder)
    config = get_model_config(model[0])
    config.finalize_model_grads_func = finalize_model_grads
    if model[0].ddp_config.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in model]
    if model[0].ddp_config.overlap_param_gather:
        config.param_sync_func = [chunk.start_param_sync for chunk in model]
    return model


def stirred(stage: Stage) -> Stage:
    """With numbers in the adapters' B, where all would begin as zero and leave A without gradients, in those that
    nobody trains (Gemma 4), and in the biases by which routers choose."""
    for name, numbers in stage.state_dict(keep_vars=True).items():
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        if name.endswith((".scalar", ".shift", "projector.scale")):
            numbers.data.copy_(1 + 0.2 * torch.randn(numbers.shape, generator=generator))
        elif name.endswith("expert_bias"):
            numbers.data.copy_(0.2 * torch.randn(len(numbers), generator=generator))
        elif name.endswith(".ranges"):
            into, out_of = BOUNDS[name.split(".")[-2]]
            bounds = torch.tensor([-into, into, -out_of, out_of]) * (
                1 + 0.3 * torch.rand(len(numbers), 4, generator=generator)
            )
            numbers.data.copy_(bounds)
    for name, adapter in adapters_in(stage):
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        whole = 0.1 * torch.randn(adapter.matrix.rows, adapter.b.shape[1], generator=generator)
        adapter.b.data.copy_(shard(whole, adapter.b))
    return stage


def finalize_what_is_under_way(modules: list[Any], *arguments: Any, **options: Any) -> None:
    """Core's `finalize_model_grads`, where the reduction of every gradient was started by an action of the schedule."""
    groups = [group for module in modules for group in (*module.bucket_groups, *module.expert_parallel_bucket_groups)]
    late = sum(group.grad_reduce_handle is None for group in groups)
    assert not late, f"{late} of {len(groups)} reductions were not started beside the backward passes"
    finalize_model_grads(modules, *arguments, **options)


def _regroup(chain: Chain, plan: Plan) -> None:
    """What `initialize_megatron` would have set up for this plan: chunks a rank, and where the embeddings are."""
    chunks = plan.virtual_pipeline_model_parallel_size if plan.virtual_pipeline_model_parallel_size > 1 else None
    get_args().virtual_pipeline_model_parallel_size = chunks
    chain.language.virtual_pipeline_model_parallel_size = chunks
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
    ranks = torch.distributed.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    everyone: list[list[int]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(everyone, ranks)
    for pipeline in sorted(set(map(tuple, everyone))):
        holders = embedding_ranks(plan)(list(pipeline))
        group = torch.distributed.new_group(holders)
        if torch.distributed.get_rank() in pipeline:
            parallel_state._EMBEDDING_GROUP = group if torch.distributed.get_rank() in holders else None
            parallel_state._EMBEDDING_GLOBAL_RANKS = holders


MakeExecutor = Callable[[str, Schedule | None], Executor]
"""Of a schedule's name, and lists in its place."""


def edges(ranks: int) -> list[tuple[int, int]]:
    """Of pipeline ranks, those that any placement has."""
    placements = (Placement.interleaved(ranks, 2), Placement.v_shaped(ranks, 3))
    return sorted({edge for placement in placements for edge in placement.edges})


def open_channels() -> Communicator:
    """As training does it. A message that takes longer than the flag says ends the run, on every channel."""
    pipeline, held = get_args().pipeline_model_parallel_size, len(distributed_c10d._world.pg_map)
    communicator = open_channels_along(ProcessGroupCollection.use_mpu_process_groups(), edges(pipeline))
    own = 2 * sum(communicator.here in edge for edge in edges(pipeline))  # however many pipelines there are
    assert len(communicator.channels) == len(distributed_c10d._world.pg_map) - held == own
    limits = {channel._get_backend(CPU).options._timeout for channel in communicator.channels.values()}
    assert limits <= {timedelta(minutes=get_args().distributed_timeout_minutes)}, limits
    assert bool(limits) == (get_args().pipeline_model_parallel_size > 1)
    return communicator


def executors(communicator: Communicator, **more: Any) -> MakeExecutor:
    """Makers of executors that share the channels that are open, as the iterations of a training run do."""

    def make(schedule: str, lists: Schedule | None) -> Executor:
        executor = Executor(schedule, lists=lists, **more)
        executor._communicator = communicator
        return executor

    return make


def run_iteration(
    model: list[torch.nn.Module], plan: Plan, packs: Sequence[Microbatch], executor: Executor, reduction: str = "token",
    dealt: bool = False,
) -> float:  # fmt: skip
    """Forward and backward of the packs, dealt over the data-parallel ranks if they are not; the global batch's mean
    loss."""
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = packs if dealt else packs[rank::ranks]
    iterators: list[Iterator[Microbatch]] = []
    for chunk in range(len(model)):
        first, end = plan.stages[stage_number(plan.placement, chunk)].layers
        needs = Needs.of(plan.chain[first:end], unwrap_model(model[chunk]).chain.architecture.language)
        iterators.append(iter([only_needed(pack, needs) for pack in mine]))
    for module in model:
        module.zero_grad_buffer()
    records = executor(
        forward_step_func=partial(_forward_step, reduction),
        data_iterator=iterators,
        model=model,
        num_microbatches=len(mine),
    )
    total = sum((record["lm loss"] for record in records), torch.zeros(2, device="cuda"))
    torch.distributed.all_reduce(total)
    return (total[0] / total[1].clamp(min=1)).item()


def _forward_step(reduction: str, data: Iterator[Microbatch], model: torch.nn.Module) -> tuple[Tensor, partial]:
    batch = weigh_samples(reduction, next(data))
    return model(batch), partial(token_loss, reduction, batch)


def gradients(model: list[torch.nn.Module]) -> dict[str, Tensor]:
    """Gradients on this rank, by the parameter's name in the chain; only of what is trained."""
    return {name: weight.main_grad.clone() for name, weight in weights_of(model) if weight.requires_grad}


def weights_of(model: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """This rank's weights, by the names that they have in one process's chain."""
    for module in model:
        for name, weight in weights_by_checkpoint_name(module):
            yield name.partition("links.")[2], weight


def reference(
    chain: Chain, packs: Sequence[Microbatch], reduction: str = "token", weights: dict[str, Tensor] | None = None
) -> Result:
    """One process, no schedule, no wrapper: the sum of all losses, backward, divided by the sum of all weights.

    `weights` take the place of those that the chain starts with.
    """
    stage = stirred(Stage(chain, 0, len(chain.kinds)))
    for name, weight in stage.named_parameters() if weights is not None else ():
        weight.data.copy_(weights[name])
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))  # an iteration before may have left another
    total, normaliser = torch.zeros(()), 0.0
    for pack in packs:
        loss, weight, _ = token_loss(reduction, pack, stage(weigh_samples(reduction, pack)))
        loss.backward()
        total, normaliser = total + loss.detach(), normaliser + weight.item()
    normaliser = max(normaliser, 1.0)  # as Megatron does where nothing counts
    gradients = {
        name.partition("links.")[2]: parameter.grad / normaliser
        for name, parameter in stage.named_parameters()
        if parameter.requires_grad
    }
    if chain.architecture.tied and "word_embed.embedding.weight" in gradients:
        gradients["head.linear.weight"] = gradients["word_embed.embedding.weight"]
    return Result((total / normaliser).item(), gradients)


def shard(whole: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor, dealt or cut as the parameter is."""
    whole, ranks = experts_here(whole, parameter), parallel_state.get_tensor_model_parallel_world_size()
    if (
        ranks == 1
        or parameter.shape == whole.shape
        or _is_dealt(parameter)
        or not getattr(parameter, "tensor_model_parallel", False)
    ):
        return whole
    stride, dim = parameter.partition_stride, parameter.partition_dim
    pieces = whole.chunk(ranks * stride, dim)
    return torch.cat(pieces[parallel_state.get_tensor_model_parallel_rank() :: ranks], dim)


def experts_here(whole: Tensor, parameter: Tensor) -> Tensor:
    """Of the matrices of all experts those that this rank has, where they are dealt."""
    ranks, rank = (
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    return whole.chunk(ranks)[rank] if _is_dealt(parameter) else whole


def _is_dealt(parameter: Tensor) -> bool:
    return not getattr(parameter, "allreduce", True)


def largest(name: str, whole: Tensor) -> Tensor:
    """The largest entry of a tensor; of experts' that of each apart."""
    return whole.abs().amax((1, 2), keepdim=True) if ".experts." in name else whole.abs().max()


def compare(model: list[torch.nn.Module], expected: Result, loss: float) -> float:
    """Largest relative difference of the loss and of any gradient (against the tensor's largest entry)."""
    worst = abs(loss - expected.loss) / max(abs(expected.loss), 1e-8)
    parameters = dict(weights_of(model))
    for name, mine in gradients(model).items():
        weight, whole = parameters[name], expected.gradients[name]
        scale = largest(name, experts_here(whole, weight)).clamp(min=1e-8)
        worst = max(worst, ((mine - shard(whole, weight)).abs() / scale).max().item())
    return worst


def report(worst: dict[str, float]) -> None:
    """Print the largest of all ranks."""
    gathered: list[dict[str, float]] = [{} for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, worst)
    if torch.distributed.get_rank() == 0:
        print("RESULT " + json.dumps({label: max(ranks[label] for ranks in gathered) for label in worst}))
