"""What a GPU does, asked in small: parts of `benchmarks/gpu.py`, which `benchmarks.gpu_parts` runs."""

import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.microbatch import Segments, segments_of
from megatron.vlm.models.attention.core_attention import KERNELS, Kernel, choose_kernel
from megatron.vlm.models.chain import Chain
from megatron.vlm.models.linear import convolution, delta_rule
from megatron.vlm.profiling.stage_pass import StagePass, equal_lengths, synthetic_pack, wrapped_stage
from megatron.vlm.profiling.stopwatch import WARM_UP, Timer
from megatron.vlm.single import single_process
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.presets import PRESETS, preset

WIDTHS, SEGMENTS = (64, 72, 80, 128, 256), (1, 300)
HEADS, GROUPS = 8, 2
HOST_TILES, HOST_TOKENS = 9, 4096
"""Of the pack for which the host's time is taken."""
ASLEEP = 40_000_000
"""Cycles for which a kernel waits: some 20 ms."""
LAYERS = 6
"""Of a kind, of which one's share is told."""


def start() -> dict[str, float]:
    """Megatron starts, NCCL adds up over the one rank."""
    began = time.perf_counter()
    with single_process("tiny", ["--bf16"]):
        numbers = torch.full((3,), 2.0, device="cuda")
        torch.distributed.all_reduce(numbers)
        total = numbers.sum().item()
    return {"seconds": time.perf_counter() - began, "sum": total}


def kernels() -> dict[str, str]:
    """For each width of heads, which kernel attends over packs and which over images."""
    with single_process("tiny", ["--bf16"]) as inputs:
        config = Chain.of(inputs.args, inputs.architecture).language
        configs = {width: replace(config, kv_channels=width) for width in WIDTHS}
        return {f"{width}": f"{choose_kernel(c)}, {choose_kernel(c, True)}" for width, c in configs.items()}


def attention(tokens: int) -> dict[str, Any]:
    """Largest difference of outputs and gradients of every kernel that is there from fp32, sample by sample, in a pack
    of so many tokens; of the largest number. What a kernel refuses is said in its words."""
    found: dict[str, Any] = {}
    for width in WIDTHS:
        for name in platform.attention_kernels(width):
            try:
                found[f"{name} {width}"] = max(_error(KERNELS[name], tokens, width, count) for count in SEGMENTS)
            except Exception as error:  # whatever a library raises that does not know this width
                found[f"{name} {width}"] = f"refused: {' '.join(str(error).split())[:200]}"
    return found


def linear_attention(tokens: int) -> dict[str, float]:
    """The same of flash-linear-attention's kernels and the torch that stands in for them; {} where they are not."""
    if not platform.HAS_LINEAR_ATTENTION:
        return {}
    return {
        f"{name}, {count} samples": error
        for count in SEGMENTS
        for name, error in _linear_errors(equal_lengths(tokens, count), torch.Generator().manual_seed(count)).items()
    }


def _linear_errors(lengths: list[int], generator: torch.Generator) -> dict[str, float]:
    def draw(*shape: int) -> Tensor:
        return platform.to_device(torch.randn(shape, generator=generator).bfloat16())

    boundaries, indices = segments_of(lengths).cu_seqlens_q, delta_rule.chunk_indices(lengths)
    positions = platform.to_device(torch.cat([torch.arange(length) for length in lengths]))
    tokens, channels = sum(lengths), 1024
    heads = [draw(tokens, HEADS, 128) for _ in range(3)]
    rates = [-draw(tokens, HEADS).float().exp() / 8, draw(tokens, HEADS).sigmoid()]
    works = {
        "delta rule": (
            lambda *rows: delta_rule.by_kernel(*rows, boundaries, indices),
            lambda *rows: delta_rule.in_chunks(*rows, delta_rule.Chunks.of(lengths)),
            [*heads, *rates],
        ),
        "convolution": (
            lambda *rows: convolution.by_kernel(*rows, boundaries, indices),
            lambda *rows: convolution.by_shifts(*rows, positions),
            [draw(tokens, channels), draw(channels, 4)],
        ),
    }
    found = {}
    for name, (kernel, exact, rows) in works.items():
        toward = torch.ones_like(rows[0 if name == "convolution" else 2])
        ours = _with_gradients(kernel, [row.clone() for row in rows], toward)
        wanted = _with_gradients(exact, [row.float() for row in rows], toward.float())
        found[name] = max(_difference(a, b) for a, b in zip(ours, wanted, strict=True))
    return found


def _difference(found: Tensor, exact: Tensor) -> float:
    return ((found.float() - exact).abs().max() / exact.abs().max()).item()


def _error(kernel: Kernel, tokens: int, width: int, count: int) -> float:
    generator = torch.Generator().manual_seed(width + count)
    shapes = [*((tokens, heads, width) for heads in (HEADS, GROUPS, GROUPS)), (tokens, HEADS * width)]
    *rows, toward = (torch.randn(shape, generator=generator).bfloat16().cuda() for shape in shapes)
    segments = segments_of(equal_lengths(tokens, count))
    ours = _with_gradients(lambda *qkv: kernel(*qkv, segments, None), rows, toward)
    exact = _with_gradients(lambda *qkv: _by_hand(*qkv, segments), [r.float() for r in rows], toward.float())
    return max(_difference(a, b) for a, b in zip(ours, exact, strict=True))


def _with_gradients(attend: Callable[..., Tensor], rows: list[Tensor], toward: Tensor) -> list[Tensor]:
    rows = [row.requires_grad_() for row in rows]
    out = attend(*rows)
    return [out.detach(), *torch.autograd.grad(out, rows, toward)]


def _by_hand(query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """Softmax over an explicit mask, in fp32: the same sample, and not later."""
    parts = []
    key, value = (tensor.repeat_interleave(HEADS // GROUPS, dim=1) for tensor in (key, value))
    for q, k, v in zip(*(tensor.split(segments.lengths) for tensor in (query, key, value)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        later = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(1)
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v).flatten(1))
    return torch.cat(parts)


def one_of_each(name: str, layers: int = 1) -> Architecture:
    """A preset with few layers of each kind."""
    model = preset(name)
    vision = replace(
        model.vision, layers=layers, feature_layers=tuple(range(len(model.vision.feature_layers[:layers])))
    )
    if vision.native and vision.native.full_layers:
        vision = replace(vision, native=replace(vision.native, full_layers=(0,)))
    further = tuple(replace(one, layers=layers) for one in model.further)
    language = replace(model.language, each_layer=model.language.each_layer[:layers])
    few = replace(model, name=f"{name}, few layers", vision=vision, language=language, further=further)
    PRESETS[few.name] = few
    return few


def waits(name: str) -> dict[str, str]:
    """Where the host waits for its device in a forward or backward pass of any kind of layer; {} is right."""
    found, few = {}, one_of_each(name)
    with single_process(few.name, ["--bf16"]) as inputs:
        chain = Chain.of(inputs.args, few)
        units = {one.modality.size: 700 for one in few.encoders} | {"tiles": 256 if few.vision.native else 2}
        pack = synthetic_pack(few, units, equal_lengths(1024, 4))
        for kind in dict.fromkeys(chain.kinds):
            step = StagePass(chain, _all_of(chain, kind), pack)
            both = (step.forward, step.backward)
            [each() for each in both]
            torch.cuda.synchronize()
            if where := _first_wait(*both):
                found[f"{name} {kind}"] = where
    return found


def _all_of(chain: Chain, kind: str) -> Any:
    first = chain.kinds.index(kind)
    return wrapped_stage(chain, first, first + chain.kinds.count(kind))


def _first_wait(*parts: Callable[[], object]) -> str:
    torch.cuda.set_sync_debug_mode("error")
    try:
        for part in parts:
            part()
    except RuntimeError as error:
        return " < ".join(
            f"{f.name} ({f.filename}:{f.lineno})" for f in traceback.extract_tb(error.__traceback__)[:-4:-1]
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def host(models: list[str]) -> dict[str, dict[str, float]]:
    """Of a layer of each tower: milliseconds that the host takes to ask for it, and the device to compute it."""
    found = {}
    for name in models:
        few = one_of_each(name, LAYERS)
        with single_process(few.name, ["--bf16"]) as inputs:
            chain = Chain.of(inputs.args, few)
            pack = synthetic_pack(few, {"tiles": HOST_TILES}, equal_lengths(HOST_TOKENS, 4))
            for kind in ("vit", "llm"):
                module, timer = _all_of(chain, kind), Timer()
                device = []
                for _ in range(WARM_UP + 5):
                    step = StagePass(chain, module, pack)
                    device.append(timer(step.forward, step.backward))
                columns = (*timer.host_seconds, *map(median, zip(*device[WARM_UP:], strict=True)))
                names = ("host_forward", "host_backward", "device_forward", "device_backward")
                found[f"{name} {kind}"] = {n: s / LAYERS * 1e3 for n, s in zip(names, columns, strict=True)}
    return found


def queues() -> dict[str, float]:
    """Milliseconds until a kernel of one stream is done while another's sleeps, with a kernel behind it."""
    sleeping, working = torch.cuda.Stream(), torch.cuda.Stream()
    numbers = [torch.zeros(1000, device="cuda") for _ in range(2)]
    taken = []
    for _ in range(5):
        torch.cuda.synchronize()
        done, began = torch.cuda.Event(), time.perf_counter()
        with torch.cuda.stream(sleeping):
            torch.cuda._sleep(ASLEEP)
            numbers[0].add_(1)
        with torch.cuda.stream(working):
            numbers[1].add_(1)
            done.record()
        done.synchronize()
        taken.append((time.perf_counter() - began) * 1e3)
    return {"milliseconds": median(taken)}
