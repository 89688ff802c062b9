"""A line of chat JSONL and its images become a sample: token ids, loss mask, and how each image is cut."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.vlm.data.anyres import feature_order
from megatron.vlm.data.chat import Rejected, parse_conversation
from megatron.vlm.data.images import MAX_PIXELS, image_size, path_below_root
from megatron.vlm.data.markup import image_markup
from megatron.vlm.data.templates import SYSTEM, Message, RenderedChat, chat_template, render_chat
from megatron.vlm.data.tiles import TiledImage, Tiling, tile_image
from megatron.vlm.data.tokenizer import ChatTokenizer, load_tokenizer
from omnibal_ext.errors import UserError


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides what a line becomes. Two runs with one recipe and one input write the same bytes."""

    image_root: Path
    tokenizer: Path
    template: str
    tiling: Tiling
    tokens_per_tile: int = 256  # LLM tokens of one ViT tile
    max_tokens: int | None = None  # longer samples are rejected, never cut
    max_pixels: int = MAX_PIXELS
    decode_images: bool = False  # read every pixel of every image, not headers only
    system_message: str | None = None  # for conversations that bring none; None is the template's, "" is none
    normalization: str = "imagenet"  # of pixels, by name
    markup: str = "internvl"  # how the text shows an image, by name


@dataclass(frozen=True, slots=True)
class Sample:
    """What the model reads: tokens int32 [T], loss_mask uint8 [T] (1 = this token is to be predicted), images."""

    tokens: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    images: tuple[TiledImage, ...]

    @property
    def tiles(self) -> int:
        """ViT tiles of all images together."""
        return sum(image.tiles for image in self.images)


class SampleMaker:
    """A recipe with its tokenizer open. Raises UserError if parts of it do not go together."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.template, self.markup = chat_template(recipe.template), image_markup(recipe.markup)
        special = (*self.template.tokens, *self.markup.tokens)
        self.tokenizer = load_tokenizer(recipe.tokenizer, special)
        self.special_tokens = {token: self.tokenizer.token_id(token) for token in special}
        self.image_token_id = self.special_tokens[self.markup.context]
        self.reserved = (*self.template.tokens, *self.markup.reserved)
        self.system = self.template.system if recipe.system_message is None else recipe.system_message
        if self.system and SYSTEM not in self.template.turns:
            raise UserError(f"chat template {self.template.name!r} has no system turn; leave --system-message out")

    def make(self, line: bytes) -> Sample:
        """Check and prepare one line of chat JSONL.

        Raises `Rejected`: the reasons of `parse_conversation` and `image_size`, path_outside_root, too_many_images,
        too_many_tokens.
        """
        conversation = parse_conversation(line, self.reserved)
        messages = conversation.messages
        if messages[0].role not in self.template.turns:
            raise Rejected("bad_roles", f"chat template {self.template.name!r} has no {messages[0].role} turn")
        if self.system and messages[0].role != SYSTEM:
            messages = (Message(SYSTEM, self.system), *messages)
        images = self._tile_images(conversation.images)
        tokens, loss_mask = tokenize(render_chat(messages, self.template, self.markup), self.tokenizer)
        rule, per_tile = self.recipe.tiling.rule, self.recipe.tokens_per_tile
        repeats = [len(feature_order(image, rule, per_tile)) for image in images]
        length, limit = len(tokens) + sum(repeats) - len(repeats), self.recipe.max_tokens
        if limit is not None and length > limit:
            raise Rejected("too_many_tokens", f"{length} tokens, limit {limit} (--max-tokens)")
        return Sample(*expand_images(tokens, loss_mask, self.image_token_id, repeats), images)

    def _tile_images(self, references: tuple[str, ...]) -> tuple[TiledImage, ...]:
        recipe, count = self.recipe, len(references)
        if count > recipe.tiling.max_tiles:
            raise Rejected("too_many_images", f"{count} images, limit {recipe.tiling.max_tiles} (--max-tiles)")
        images = []
        for reference in references:
            path = path_below_root(reference)
            size = image_size(recipe.image_root / path, recipe.max_pixels, recipe.decode_images)
            images.append(tile_image(path, size, count, recipe.tiling))
        return tuple(images)


open_recipe = cache(SampleMaker)  # one tokenizer a process, however many parts it prepares


def tokenize(chat: RenderedChat, tokenizer: ChatTokenizer) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Token ids int32 [T] of a rendered chat, and its loss mask uint8 [T]: tokens that hold a trained character."""
    encoding = tokenizer.encode(chat.text)
    loss_mask = np.zeros(len(encoding.ids), dtype=np.uint8)
    for start, end in chat.trained:
        loss_mask[encoding.covers(start, end)] = 1
    return encoding.ids, loss_mask


def expand_images(
    tokens: NDArray[np.int32], loss_mask: NDArray[np.uint8], image_token: int, repeats: list[int]
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Repeat the k-th image token `repeats[k]` times: the places that the projector's outputs will take.

    <img> CONTEXT </img> What is it?  ->  <img> CONTEXT CONTEXT ... CONTEXT </img> What is it?
    """
    counts = np.ones(len(tokens), dtype=np.int64)
    counts[tokens == image_token] = repeats
    return np.repeat(tokens, counts), np.repeat(loss_mask, counts)
