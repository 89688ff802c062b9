"""Measures what a layer of every kind costs at the shapes that training runs: the `Profile` that plans are made from.

For each kind of layer:
1. Build it alone, as a stage, in Megatron's DDP wrapper: gradients are accumulated as in training.
2. Run it forward and backward at the packed shape; the median of the steps is its cost.
3. Hook what autograd saves: the bytes kept for the backward pass, weights left out.
4. Run it at smaller and differently divided packs, and fit how its time depends on a pack.
"""

import contextlib
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from megatron.core.enums import ModelType
from megatron.core.utils import get_attr_wrapped_model
from megatron.training.training import get_model
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.models.configs import language_config, vision_config
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.single import single_process
from omnibal_ext.architectures import Architecture
from omnibal_ext.chain import VISION_KINDS
from omnibal_ext.console import track
from omnibal_ext.profile_data import Fit, LayerCost, Profile

NUM_SAMPLES = 4  # of the pack that is measured at the budgets


def profile_on_this_machine(
    preset: str, vit_budget: int, llm_budget: int, tensor_parallel: int, flags: Sequence[str], steps: int
) -> Profile | None:
    """Start Megatron on this process (or these, under torchrun) and measure; None but on rank 0."""
    with single_process(preset, ["--tensor-model-parallel-size", str(tensor_parallel), *flags]) as inputs:
        profile = measure_profile(inputs.args, inputs.architecture, vit_budget, llm_budget, steps)
        return profile if torch.distributed.get_rank() == 0 else None


def measure_profile(
    args: Namespace, architecture: Architecture, vit_budget: int, llm_budget: int, steps: int = 5
) -> Profile:
    """Measure all kinds of layers on this device, with the parallelism and precision of Megatron's `args`."""
    language = language_config(args, architecture)
    chain = Chain(architecture, language, vision_config(language, architecture), args.padded_vocab_size, args.seed)
    kinds = list(dict.fromkeys(chain.kinds))
    layers, parameters = {}, {}
    for kind in track(kinds, "profiling layers", len(kinds)):
        model = _single_layer(chain, chain.kinds.index(kind))
        layers[kind] = _layer_cost(args, chain, kind, model, _packs(architecture, kind, vit_budget, llm_budget), steps)
        parameters[kind] = sum(_whole_size(weight) for weight in model.parameters())
    return Profile(
        model=architecture.name,
        model_hash=architecture.hash,
        chain=chain.kinds,
        layers=layers,
        vit_budget=vit_budget,
        llm_budget=llm_budget,
        parameters=parameters,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        device=platform.device_name(),
        dtype=str(args.params_dtype).removeprefix("torch."),
        notes={"torch": torch.__version__, "steps": steps, "threads": torch.get_num_threads()},
    )


def _single_layer(chain: Chain, link: int) -> torch.nn.Module:
    def provide(**_: object) -> Stage:
        return Stage(chain, link, link + 1)

    (model,) = get_model(provide, ModelType.encoder_or_decoder)
    return model


def _packs(architecture: Architecture, kind: str, vit_budget: int, llm_budget: int) -> list[Microbatch]:
    """Packs at the budgets and, for the fit, half as large and otherwise divided."""
    make = partial(_synthetic_pack, architecture)
    if kind in VISION_KINDS:
        return [make(vit_budget, llm_budget, NUM_SAMPLES), make(max(1, vit_budget // 2), llm_budget, NUM_SAMPLES)]
    half = max(NUM_SAMPLES, llm_budget // 2)
    packs = [make(vit_budget, llm_budget, NUM_SAMPLES), make(vit_budget // 2, half, NUM_SAMPLES)]
    return [*packs, make(vit_budget, llm_budget, 1)] if kind == "llm" else packs


def _synthetic_pack(architecture: Architecture, tiles: int, tokens: int, samples: int) -> Microbatch:
    """A pack of `samples` equal samples; random pixels and tokens, image tokens in front as far as they fit."""
    lengths = [len(part) for part in np.array_split(np.arange(tokens), samples)]
    size = architecture.vision.image_size
    ids = torch.randint(0, architecture.language.vocab_size, (tokens,), device="cuda")
    image_tokens = min(tokens, tiles * architecture.image_tokens_per_tile)
    return Microbatch(
        tiles=tiles,
        lengths=tuple(lengths),
        samples=samples,
        useful_tokens=tokens,
        pixels=torch.randn(tiles, 3, size, size, device="cuda"),
        input_ids=ids,
        image_positions=torch.arange(image_tokens, device="cuda"),
        labels=ids,
        loss_mask=torch.ones(tokens, device="cuda"),
    )


def _layer_cost(
    args: Namespace, chain: Chain, kind: str, model: torch.nn.Module, packs: Sequence[Microbatch], steps: int
) -> LayerCost:
    times = [_seconds(chain, model, pack, steps) for pack in packs]
    kept, input_bytes, output_bytes = _bytes(chain, model, packs[0])
    features = [_features(kind, pack) for pack in packs]
    forward, backward = zip(*times, strict=True)
    local_weights = sum(weight.numel() for weight in model.parameters())
    return LayerCost(
        forward_seconds=forward[0],
        backward_seconds=backward[0],
        kept_bytes=kept,
        recompute_kept_bytes=input_bytes,
        weight_bytes=local_weights * bytes_per_weight(args),
        output_bytes=output_bytes,
        step_seconds=_optimizer_seconds(model, steps),
        forward_fit=_fit(features, forward),
        backward_fit=_fit(features, backward),
    )


def bytes_per_weight(args: Namespace) -> float:
    """Bytes one weight takes: itself, its fp32 gradient, and Adam's state (sharded by the distributed optimizer).

    fp32: 4 + 4 + 8. Half precision: 2 + 4 + (4 master + 8); the distributed optimizer divides the state by the ranks.
    """
    half = args.params_dtype != torch.float32
    state = 12 if half else 8
    shards = args.data_parallel_size if args.use_distributed_optimizer else 1
    return (2 if half else 4) + 4 + state / shards


def _input(chain: Chain, model: torch.nn.Module, pack: Microbatch) -> Tensor | None:
    """What the link before would hand over."""
    link = get_attr_wrapped_model(model, "first")
    if link == 0:
        return None
    shape = list(chain.shape_before(link, pack))
    if chain.kinds[link] == "word_embed":
        assert pack.image_positions is not None
        shape[0] = len(pack.image_positions)
    return torch.randn(shape, device="cuda", dtype=chain.language.pipeline_dtype, requires_grad=True)


def _run(model: torch.nn.Module, pack: Microbatch, entering: Tensor | None) -> tuple[float, float]:
    """Seconds of one forward and one backward."""
    get_attr_wrapped_model(model, "set_input_tensor")(entering)
    started = _now()
    out = model(pack)
    middle = _now()
    torch.autograd.backward(out, torch.ones_like(out))
    return middle - started, _now() - middle


def _seconds(chain: Chain, model: torch.nn.Module, pack: Microbatch, steps: int) -> tuple[float, float]:
    """Median seconds of forward and backward; the first two steps warm up."""
    runs = [_run(model, pack, _input(chain, model, pack)) for _ in range(steps + 2)][2:]
    forward, backward = zip(*runs, strict=True)
    return statistics.median(forward), statistics.median(backward)


def _now() -> float:
    platform.synchronize()
    return time.perf_counter()


def _bytes(chain: Chain, model: torch.nn.Module, pack: Microbatch) -> tuple[int, int, int]:
    """Bytes kept for the backward pass (the input among them), of the input, and of the output."""
    entering = _input(chain, model, pack)
    get_attr_wrapped_model(model, "set_input_tensor")(entering)
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    with kept_storages(weights) as kept:
        out = model(pack)
    input_bytes = 0
    if entering is not None:
        input_bytes = entering.numel() * entering.element_size()
        kept[entering.untyped_storage().data_ptr()] = input_bytes
    return sum(kept.values()), input_bytes, out.numel() * out.element_size()


@contextlib.contextmanager
def kept_storages(left_out: set[int]) -> Iterator[dict[int, int]]:
    """Collect what autograd saves inside the block: address of each storage -> bytes; `left_out` holds addresses."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def _optimizer_seconds(model: torch.nn.Module, steps: int) -> float:
    """Median seconds of an Adam step over the layer's weights."""
    weights = [torch.zeros_like(weight, dtype=torch.float32).requires_grad_() for weight in model.parameters()]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW(weights)
    return _median(optimizer.step, steps)


def _median(function: Callable[[], object], steps: int) -> float:
    seconds = []
    for _ in range(steps + 1):
        started = _now()
        function()
        seconds.append(_now() - started)
    return statistics.median(seconds[1:])


def _features(kind: str, pack: Microbatch) -> tuple[float, float, float]:
    """What the time of a layer depends on: a constant, units (tiles or tokens), squared sample lengths."""
    if kind in VISION_KINDS:
        return (1.0, pack.tiles, 0.0)
    return (1.0, pack.tokens, float(sum(length**2 for length in pack.lengths)) if kind == "llm" else 0.0)


def _fit(features: Sequence[tuple[float, float, float]], seconds: Sequence[float]) -> Fit:
    """Coefficients, none negative, that meet the time at the budgets exactly and the others as well as they can."""
    matrix, times = np.array(features), np.array(seconds)
    used = [column for column in range(3) if matrix[:, column].any()]
    while True:
        scale = np.abs(matrix[:, used]).max(axis=0)
        found = np.linalg.lstsq(matrix[:, used] / scale, times, rcond=None)[0] / scale
        if (found >= 0).all() or len(used) == 1:
            break
        used.remove(used[int(np.argmin(found * scale))])
    coefficients = np.zeros(3)
    coefficients[used] = found
    coefficients *= times[0] / (matrix[0] @ coefficients)
    return float(coefficients[0]), float(coefficients[1]), float(coefficients[2])


def _whole_size(weight: torch.nn.Parameter) -> int:
    """Numbers in a weight over all tensor-parallel ranks."""
    ranks = torch.distributed.get_world_size() if getattr(weight, "tensor_model_parallel", False) else 1
    return weight.numel() * ranks
