"""Attention two ways, where no plan of cuDNN's need be built a second time: a part of `benchmarks/gpu.py`'s trace.

Tiles are a batch of `scaled_dot_product_attention`, of which cuDNN has a plan for each number of tiles: at most as many
as the budget has. The other way are rows of variable length, by the kernel for packs, whose numbers are copied tile by
tile before and back behind it. Samples with masks of their own are such batches too, one by one, with a plan for each
length; torch's memory-efficient kernel has no plans.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.vlm import platform
from megatron.vlm.microbatch import segments_of
from megatron.vlm.models.attention.core_attention import ImageAttention, TileAttention, by_torch, choose_kernel
from megatron.vlm.models.chain import Chain
from megatron.vlm.profiling.stopwatch import WARM_UP, Timer
from megatron.vlm.single import single_process
from omnibal_ext.modalities.modality import VISION

MASKED = (8, 256, 2048)
"""Heads, their width and tokens of a sample with a mask, as Gemma 3's."""
BATCH = "tiles: a batch"
NEW = 3
"""Sizes that were not asked for before, of which the first call is timed."""
ROUNDS = 5
Way = Callable[..., Tensor]


def by_rows(attention: ImageAttention, tokens: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """What `TileAttention` computes, by a kernel for packs: [tokens x tiles, 1, heads, width], token by token, to the
    same rows with heads x width numbers."""
    tiles = len(query) // tokens
    rows = (t.unflatten(0, (tokens, tiles)).transpose(0, 1).flatten(0, 1) for t in (query, key, value))
    out = attention(*rows, packed_seq_params=segments_of([tokens] * tiles, causal=False))
    return out.unflatten(0, (tiles, tokens)).transpose(0, 1).flatten(0, 1)


def by_efficient_kernel(*arguments: Any) -> Tensor:
    """What `by_torch` computes, without cuDNN."""
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        return by_torch(*arguments)


def ways(model: str, tiles: int) -> dict[str, dict[str, float]]:
    """Of each way: milliseconds forward and backward of so many tiles, or of a sample with a mask, once it is planned;
    and of the first call of another size."""
    with single_process(model, ["--bf16"]) as inputs:
        chain = Chain.of(inputs.args, inputs.architecture)
        vision, tokens = chain.configs[VISION], inputs.architecture.vision.tokens_per_tile
        packed, kernel = ImageAttention(vision), choose_kernel(vision, True).replace("_", " ")
        heads, width, length = MASKED

        def draw_tiles(more: int) -> list[Tensor]:
            shape = (tokens * (tiles + more), 1, vision.num_attention_heads, vision.kv_channels)
            return [torch.randn(shape, device="cuda", dtype=vision.params_dtype) for _ in range(3)]

        def draw_sample(more: int) -> list[Tensor]:
            shape = (1, length + more, heads, width)
            return [torch.randn(shape, device="cuda", dtype=vision.params_dtype) for _ in range(3)]

        def masked(way: Way, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return way(packed, True, query, key, value, _mask(query))

        timed = {
            BATCH: _timed(TileAttention(vision, tokens), draw_tiles),
            f"tiles: rows, {kernel}": _timed(partial(by_rows, packed, tokens), draw_tiles),
        }
        for name, way in (("torch's choice", by_torch), ("memory-efficient", by_efficient_kernel)):
            timed[f"a masked sample: {name}"] = _timed(partial(masked, way), draw_sample)
        return timed


def _mask(query: Tensor) -> Tensor:
    """Causal but for the first half, which sees itself: [s, s] to be added."""
    length = query.shape[1]
    mask = torch.full((length, length), -torch.inf, device=query.device, dtype=query.dtype).triu(1)
    mask[: length // 2, : length // 2] = 0
    return mask


def _timed(way: Way, draw: Callable[[int], list[Tensor]]) -> dict[str, float]:
    """Of what `draw` gives for 0, and for larger sizes; forward and backward."""

    def both(given: list[Tensor]) -> None:
        out = way(*(tensor.requires_grad_() for tensor in given))
        torch.autograd.grad(out, given, torch.ones_like(out))

    step, timer, first = partial(both, draw(0)), Timer(), []
    rounds = [timer(step, before=step)[0] for _ in range(WARM_UP + ROUNDS)]
    for more in range(1, NEW + 1):
        given, began = draw(more), platform.now()
        both(given)
        first.append(platform.now() - began)
    return {"ms": median(rounds[WARM_UP:]) * 1e3, "first ms": median(first) * 1e3}
