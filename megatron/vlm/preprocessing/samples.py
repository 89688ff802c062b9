"""Makes a sample of a conversation, its images and sounds: token ids, loss mask, grids of tiles, mel frames."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.vlm.data.formats.kinds import IMAGES, MEDIA, VIDEOS
from megatron.vlm.data.formats.rows import PartSource, Row
from megatron.vlm.data.templates import ChatTemplate, RenderedChat, render_chat
from megatron.vlm.data.turns import SYSTEM, Message
from megatron.vlm.preprocessing.chat import Conversation, parse_conversation
from megatron.vlm.preprocessing.folder_template import open_template
from megatron.vlm.preprocessing.line_fields import quoted
from megatron.vlm.preprocessing.line_media import LineMedia
from megatron.vlm.preprocessing.measures.registry import MEASURES
from megatron.vlm.preprocessing.recipe import Recipe
from megatron.vlm.preprocessing.record_media import Senses
from megatron.vlm.preprocessing.shorten import Content, shorter
from megatron.vlm.preprocessing.tokenizer import ChatTokenizer, TokenizedText, load_tokenizer
from megatron.vlm.preprocessing.tool_turns import check_forms
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.families.markup import KINDS, HeardTurns
from omnibal_ext.families.media import TILINGS
from omnibal_ext.families.registry import TEMPLATES, image_markup
from omnibal_ext.modalities.modality import AUDIO, VISION, Modality
from omnibal_ext.modalities.vision.runs import TokenRuns


@dataclass(frozen=True, slots=True)
class Sample:
    """The stored sample of a line."""

    tokens: NDArray[np.int32]
    """[T], one image (video, audio) token for each run of them, several for a video that is heard too."""
    loss_mask: NDArray[np.uint8]
    """[T], 1 = this token is to be predicted."""
    items: Mapping[Modality, tuple[Any, ...]]
    """Images and sounds, in the order of their tokens."""
    length: int
    """Tokens that the language model reads, those of images and sounds counted."""
    shortened: str | None = None
    """Method of `SHORTENINGS`; None: not shortened."""

    def units(self, modality: Modality) -> int:
        """Return the tiles of all images together, or the mel frames of all sounds."""
        return sum(item.units for item in self.items.get(modality, ()))

    @property
    def video_files(self) -> int:
        """Videos that are video files, not lists of frames."""
        return sum(item.is_video_file for items in self.items.values() for item in items)


class SampleMaker:
    """Makes samples by a recipe. Raises UserError if its settings contradict each other."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.template, self.markup = open_template(recipe.template, recipe.tokenizer), image_markup(recipe.markup)
        special = (*self.template.tokens, *self.markup.tokens)
        self.tokenizer = load_tokenizer(recipe.tokenizer, special)
        self.special_tokens = {token: self.tokenizer.token_id(token) for token in special}
        self.image_token_id = self.special_tokens[self.markup.context]
        self.video_token_id = self.special_tokens[self.markup.video] if self.markup.video else None
        tokens = self.markup.tokens_of_further
        self.further_tokens = {one: self.special_tokens.get(tokens.get(one, "")) for one in recipe.rules}
        taken = (kind for kind in MEDIA if kind.modality in (VISION, *recipe.rules))
        self.senses = Senses(tuple(kind for kind in taken if kind != VIDEOS or recipe.video))
        # Other special tokens may be in conversations: boxes, references, the user's own.
        of_tokenizer = self.tokenizer.reserved
        as_words = [quoted(mark) for mark in self.markup.marks if mark in of_tokenizer.union(special)]
        others = (*self.markup.reserved, *sorted(of_tokenizer.difference(self.markup.marks)), *as_words)
        self.reserved = tuple(dict.fromkeys((*self.template.tokens, *others)))
        first = self.template.images_first
        self.first = self.markup.first if first is None else first
        self.rule = TILINGS[recipe.tiling.rule]
        if recipe.video and not (self.markup.video and self.rule.native):
            raise UserError(f"image markup {recipe.markup!r} with tiling {recipe.tiling.rule!r} has no videos")
        if unknown := [one.inputs for one in recipe.rules if one not in tokens]:
            raise UserError(f"image markup {recipe.markup!r} has no {unknown[0]}")
        if recipe.use_audio_in_video and not (recipe.video and recipe.clock):
            raise UserError("--use-audio-in-video is for models that see and hear videos; name one with --model")
        if self.rule.native and "fewer-tiles" in recipe.shorten:
            raise UserError("--shorten fewer-tiles: at native resolution an image has no tiles; lower --max-tiles")
        if self.template.pair != self.rule.prefix_attention:
            raise UserError(
                f"chat template {self.template.name!r} with tiling {recipe.tiling.rule!r}: one of them is for one "
                "question and its answer, the other for several turns; leave both out, or give the model's own"
            )
        if recipe.system_message and not self.template.has_system:
            raise UserError(f"chat template {self.template.name!r} has no system turn; leave --system-message out")
        if marked := [mark for mark in KINDS if mark in (recipe.system_message or "")]:
            raise UserError(f"--system-message: {marked[0]} marks media, of which it has none; leave the mark out")
        if recipe.system_message == "" and recipe.template not in TEMPLATES:
            raise UserError(f'{recipe.template}: decides on system messages itself; leave --system-message "" out')

    def make(self, row: Row, source: PartSource | None = None) -> Sample:
        """Make the sample of one row of `source` (which may set an image root and a limit of tiles).

        Raises `Rejected`: `row.fault`, reasons of `parse_conversation`, `image_size`, `video_facts`, `choose_frames`,
        `sound_length`; path_outside_root, remote_image, remote_video, remote_audio, frames_differ, too_short_audio,
        too_many_tokens.
        """
        if row.fault:
            raise Rejected(*row.fault)
        conversation = parse_conversation(row.record, self.reserved, self.markup.gap, self.senses, self.first)
        messages = conversation.messages
        if messages[0].role == SYSTEM and not self.template.has_system:
            raise Rejected("bad_roles", f"chat template {self.template.name!r} has no system turn")
        check_forms(messages, conversation.tools, self.template, self.senses)
        if self.template.pair:
            _check_pair(messages, conversation.media[IMAGES], self.template)
        if self.recipe.system_message and messages[0].role != SYSTEM:
            messages = (Message(SYSTEM, self.recipe.system_message), *messages)
        said = conversation.hears_videos
        media = LineMedia(self.recipe, row, source, self.recipe.use_audio_in_video if said is None else said)
        sample = self._fitted(messages, conversation, media)
        # Large images are decoded only now: most lines that are too long never get here.
        return self._fitted(messages, conversation, media) if media.decode_the_rest() else sample

    def _fitted(self, messages: tuple[Message, ...], conversation: Conversation, media: LineMedia) -> Sample:
        """Make the sample with the sizes that are known, shortened if it must be. Raises `Rejected`."""
        named = {kind: iter(references) for kind, references in conversation.media.items()}
        measured = tuple(
            tuple(MEASURES[kind](media, next(named[kind])) for kind in self.senses.kinds_in(message.words))
            for message in messages
        )
        tiling = self.recipe.tiling
        if media.source and media.source.max_tiles:
            tiling = replace(tiling, max_tiles=media.source.max_tiles)
        content = Content(messages, measured, tiling, conversation.tools)
        sample, limit = self._prepare(content), self.recipe.max_tokens
        if limit is None or sample.length <= limit:
            return sample
        for method, form in shorter(content, self.recipe.shorten):
            made = self._prepare(form)
            if made.length <= limit:
                return replace(made, shortened=method)
        raise Rejected("too_many_tokens", f"{sample.length} tokens, limit {limit} (--max-tokens)")

    def _prepare(self, content: Content) -> Sample:
        items = content.items()
        images, further = items[VISION], [one for modality in self.recipe.rules for one in items.get(modality, ())]
        of_images: list[TokenRuns | HeardTurns] = [self.rule.runs(image) for image in images]
        for sound in items.get(AUDIO, ()):
            if sound.turns:
                of_images[sound.video] = HeardTurns(len(sound.turns))
        shown = [
            image.film.times if image.film and isinstance(one, TokenRuns) else one
            for image, one in zip(images, of_images, strict=True)
        ]
        adds_system = self.recipe.system_message is None
        chat = render_chat(content.messages, self.template, self.markup, shown, content.tools, adds_system)
        tokens, loss_mask = tokenize(chat, self.tokenizer)
        features = sum(len(self.rule.order(image, self.recipe.tokens_per_tile)) for image in images)
        runs = [run for one in further for run in one.runs]
        written = sum(one.count for one in of_images) + len(runs)
        return Sample(tokens, loss_mask, items, len(tokens) + features + sum(runs) - written)


def _check_pair(messages: Sequence[Message], images: Sequence[str], template: ChatTemplate) -> None:
    if len(messages) > 2:
        raise Rejected(
            "several_turns", f"{len(messages)} turns; chat template {template.name!r} has a question and its answer"
        )
    if not images:
        raise Rejected("no_image", f"chat template {template.name!r} has no question without an image")


open_recipe = cache(SampleMaker)  # one tokenizer per process


def tokenize(chat: RenderedChat, tokenizer: ChatTokenizer) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Return token ids int32 [T] of a rendered chat; loss mask uint8 [T], 1 for tokens with a trained character."""
    encoding = _encoded(chat, tokenizer)
    loss_mask = np.zeros(len(encoding.ids), dtype=np.uint8)
    for start, end in chat.trained:
        loss_mask[encoding.covers(start, end)] = 1
    return encoding.ids, loss_mask


def _encoded(chat: RenderedChat, tokenizer: ChatTokenizer) -> TokenizedText:
    """Encode the text between cuts separately; character ranges are in the entire text."""
    parts = []
    for start, end in pairwise((0, *chat.cuts, len(chat.text))):
        part = tokenizer.encode(chat.text[start:end])
        parts.append(TokenizedText(part.ids, part.starts + start, part.ends + start))
    return TokenizedText(*map(np.concatenate, zip(*parts, strict=True)))
