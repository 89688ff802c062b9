"""What a token sees: words before it, its whole image, no further back than a window, and nothing of another sample."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.vlm.media import Images, together
from megatron.vlm.microbatch import Microbatch, Segments
from megatron.vlm.models.language_view import LanguageView, LanguageViewer
from omnibal_ext.architectures.architecture import Architecture
from tests.distributed.harness import GEMMA, PALIGEMMA, SMALL
from tests.languages import altered

PER_IMAGE = GEMMA.image_tokens_per_tile
LENGTHS, STARTS = (6, 9, 4, 3), (2, 6, 11, 15)
"""Four samples: an image that ends its sample, one that begins and one that ends it, one alone, words."""


def pack(lengths: tuple[int, ...], starts: tuple[int, ...], prefixes: tuple[int, ...] = ()) -> Microbatch:
    return Microbatch(
        lengths,
        len(lengths),
        sum(lengths),
        media={"tiles": Images(together(len(starts)), starts=starts)},
        prefixes=prefixes,
    )


def may_see(query: int, key: int, images: list[range], window: int | None) -> bool:
    """As the model's authors say it: one image's tokens, else none behind; and the window for all."""
    together = any(query in image and key in image for image in images)
    return (key <= query or together) and (window is None or key > query - window)


@pytest.mark.parametrize("window", [None, 3])
def test_a_prompt_is_seen_in_both_directions_and_its_answer_in_one(window: int | None) -> None:
    """As the model's authors say it: whatever the window, which an answer looks back over; padding has no prompt."""
    language = altered(altered(PALIGEMMA.language, window=None, theta=1e3), only=(0,), window=window or 99)
    batch = pack((6, 9, 1, 4), (0, 6), (4, 8, 1))
    view = LanguageViewer(replace(PALIGEMMA, language=language), torch.float32)(batch)
    for length, prefix, mask in zip(batch.lengths, (4, 8, 1, 0), near(view).masks, strict=True):
        assert seen_by(mask, length).tolist() == [
            [max(q, k) < prefix or (k <= q and (window is None or k > q - window)) for k in range(length)]
            for q in range(length)
        ]
    assert [mask is None for mask in view.seen[None].masks] == [False, False, True, True]


def seen_by(mask: Tensor | None, length: int) -> Tensor:
    """Of a sample's tokens by each; without a mask those before it."""
    return torch.ones(length, length).tril().bool() if mask is None else mask == 0


def near(view: LanguageView) -> Segments:
    """Of the layers with a window; in a model without one, of all."""
    return view.seen[max((window for window in view.seen if window), default=None)]


@pytest.mark.parametrize("window", [None, 3])
def test_no_token_sees_another_sample(window: int | None) -> None:
    language = altered(altered(GEMMA.language, window=None, theta=1e3, scaling=None), only=(1,), window=window or 99)
    view = LanguageViewer(replace(GEMMA, language=language), torch.float32)(pack(LENGTHS, STARTS))
    begin, segments = 0, near(view)
    for length, mask in zip(LENGTHS, segments.masks, strict=True):
        here = [start - begin for start in STARTS if begin <= start < begin + length]
        images, found = [range(start, start + PER_IMAGE) for start in here], seen_by(mask, length)
        assert found.tolist() == [[may_see(q, k, images, window) for k in range(length)] for q in range(length)]
        assert mask is None or (mask[~found] == -torch.inf).all()
        begin += length
    assert len(view.seen[None].masks) == len(LENGTHS)


@pytest.mark.parametrize(
    ("model", "batch", "masked"),
    [
        (GEMMA, pack((3, 2), ()), (False, False)), (GEMMA, pack((5, 2), ()), (False, True)),
        (GEMMA, pack((6,), (1,)), (True, True)), (SMALL, pack((6,), (1,)), (False, False)),
    ],
    ids=["short words", "long words", "an image", "a model without"],
)  # fmt: skip
def test_packs_without_a_need_for_masks_have_none(model: Architecture, batch: Microbatch, masked: tuple) -> None:
    view = LanguageViewer(model, torch.bfloat16)(batch)
    assert (bool(view.seen[None].masks), bool(near(view).masks)) == masked
