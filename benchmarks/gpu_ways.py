"""Attention with plans of cuDNN's, and without: a part of `benchmarks/gpu.py`'s trace.

Tiles: the trainer gives them to `scaled_dot_product_attention` as one batch, for which cuDNN builds a plan for each
number of tiles. The other way is the kernel for packs, to which tiles are sequences; rows are copied into the order of
tiles before it, and back after it. Samples with masks of their own: the trainer gives them to the same function one by
one, and cuDNN builds a plan for each length. The other way is torch's memory-efficient kernel, which has no plans.
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
from megatron.vlm.profiling.stopwatch import median_seconds
from megatron.vlm.single import single_process
from omnibal_ext.modalities.modality import VISION

MASKED = (8, 256, 2048)
"""Heads, their width and tokens of a sample with a mask, as Gemma 3's."""
BATCH = "tiles: a batch"
NEW = 3
"""Sizes that were not used before, whose first calls are timed."""
ROUNDS = 5
Way = Callable[..., Tensor]


def by_rows(attention: ImageAttention, tokens: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute what `TileAttention` does by a kernel for packs: [tokens x tiles, 1, heads, width], token by token, ->
    [tokens x tiles, 1, heads x width]."""
    tiles = len(query) // tokens
    rows = (t.unflatten(0, (tokens, tiles)).transpose(0, 1).flatten(0, 1) for t in (query, key, value))
    out = attention(*rows, packed_seq_params=segments_of([tokens] * tiles, causal=False))
    return out.unflatten(0, (tiles, tokens)).transpose(0, 1).flatten(0, 1)


def by_efficient_kernel(*arguments: Any) -> Tensor:
    """Compute what `by_torch` does without cuDNN."""
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        return by_torch(*arguments)


def ways(model: str, tiles: int) -> dict[str, dict[str, float]]:
    """Measure each way forward and backward, for `tiles` tiles and for a sample with a mask: "ms" of a call of a size
    that was used before, "first ms" of the first call of a size that was not."""
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
    """Return a mask [s, s] to be added to the scores: causal, and the first half of the tokens see each other."""
    length = query.shape[1]
    mask = torch.full((length, length), -torch.inf, device=query.device, dtype=query.dtype).triu(1)
    mask[: length // 2, : length // 2] = 0
    return mask


def _timed(way: Way, draw: Callable[[int], list[Tensor]]) -> dict[str, float]:
    """Time a way forward and backward: of inputs `draw(0)` after warm-up, and the first calls of larger ones."""

    def both(given: list[Tensor]) -> None:
        out = way(*(tensor.requires_grad_() for tensor in given))
        torch.autograd.grad(out, given, torch.ones_like(out))

    planned, first = median_seconds(partial(both, draw(0)), ROUNDS), []
    for more in range(1, NEW + 1):
        given, began = draw(more), platform.now()
        both(given)
        first.append(platform.now() - began)
    return {"ms": planned * 1e3, "first ms": median(first) * 1e3}
