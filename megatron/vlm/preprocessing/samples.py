"""From a conversation, its images and sounds to a sample: token ids, loss mask, grids of tiles, mel frames."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.vlm.data.formats.places import embedded
from megatron.vlm.data.formats.rows import PartSource, Place, Row
from megatron.vlm.data.markup import image_markup
from megatron.vlm.data.media.crc import crc_of
from megatron.vlm.data.media.images import MAX_PIXELS, image_size, path_below_root
from megatron.vlm.data.media.mel import Sound, SoundRule
from megatron.vlm.data.media.sounds import sound_length
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.data.media.tiling import TiledImage
from megatron.vlm.data.media.video_rules import VideoRule, choose_frames, frame_grid
from megatron.vlm.data.media.video_sounds import token_turns
from megatron.vlm.data.media.videos import read_frames, video_facts
from megatron.vlm.data.rejects import Rejected
from megatron.vlm.data.templates import TEMPLATES, ChatTemplate, RenderedChat, render_chat
from megatron.vlm.data.turns import SYSTEM, Message
from megatron.vlm.families.media import TILINGS
from megatron.vlm.preprocessing.chat import parse_conversation
from megatron.vlm.preprocessing.folder_template import open_template
from megatron.vlm.preprocessing.record_media import Senses, VideoReference
from megatron.vlm.preprocessing.shorten import Content, HeardVideo, ImageFile, shorter
from megatron.vlm.preprocessing.tokenizer import ChatTokenizer, TokenizedText, load_tokenizer
from megatron.vlm.preprocessing.tool_turns import check_forms
from omnibal_ext.architectures.vision import VideoClock
from omnibal_ext.errors import UserError
from omnibal_ext.families.markup import AUDIO_MARK, IMAGE_MARK, MARKS, HeardTurns, Places


@dataclass(frozen=True, slots=True)
class Recipe:
    """All settings that decide a sample: the same recipe and input give the same bytes."""

    image_root: Path | None  # base of image paths; None: each input file's folder
    tokenizer: Path
    template: str  # a name of `TEMPLATES`, or a file
    tiling: Tiling
    tokens_per_tile: float = 256  # image tokens per ViT tile; below 1 if tiles are patches
    max_tokens: int | None = None  # longer samples are shortened or rejected
    shorten: tuple[str, ...] = ()  # of `shorten.METHODS`, in the order in which they are tried
    max_pixels: int = MAX_PIXELS
    decode_images: bool = False  # decode every image and sound, not headers only
    image_checksums: bool = True  # record the CRC-32 of every file
    system_message: str | None = None  # the default one; None: the template's, "": none
    normalization: str = "imagenet"  # a name of `NORMALIZATIONS`
    markup: str = "internvl"  # a name of `MARKUPS`
    video: VideoRule | None = None  # None: the model does not see videos
    audio: SoundRule | None = None  # None: the model does not hear
    clock: VideoClock | None = None  # how a video and its own sound take turns; None: the model does not hear videos
    use_audio_in_video: bool = False  # hear the sound of videos, where a record does not say


@dataclass(frozen=True, slots=True)
class Sample:
    """The stored sample of a line."""

    tokens: NDArray[np.int32]
    """[T], one image (video, audio) token for each run of them, several for a video that is heard too."""
    loss_mask: NDArray[np.uint8]
    """[T], 1 = this token is to be predicted."""
    images: tuple[TiledImage, ...]
    length: int
    """Tokens that the language model reads, all image and audio tokens counted."""
    sounds: tuple[Sound, ...] = ()
    shortened: str | None = None
    """Of `shorten.METHODS`; None: not shortened."""

    @property
    def tiles(self) -> int:
        """ViT tiles of all images together."""
        return sum(image.tiles for image in self.images)

    @property
    def frames(self) -> int:
        """Mel frames of all sounds together."""
        return sum(sound.frames for sound in self.sounds)

    @property
    def video_files(self) -> int:
        """Videos that are video files, not lists of frames."""
        return sum(image.film is not None and not image.film.files for image in self.images)


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
        self.audio_token_id = self.special_tokens.get(self.markup.audio) if recipe.audio else None
        self.senses = Senses(recipe.video is not None, recipe.audio is not None)
        # Other special tokens may be in conversations: boxes, references, the user's own.
        of_tokenizer = sorted(self.tokenizer.reserved - {IMAGE_MARK})
        self.reserved = tuple(dict.fromkeys((*self.template.tokens, *self.markup.reserved, *of_tokenizer)))
        self.rule = TILINGS[recipe.tiling.rule]
        if recipe.video and not (self.markup.video and self.rule.native):
            raise UserError(f"image markup {recipe.markup!r} with tiling {recipe.tiling.rule!r} has no videos")
        if recipe.audio and not self.markup.audio:
            raise UserError(f"image markup {recipe.markup!r} has no sounds")
        if recipe.use_audio_in_video and not (recipe.video and recipe.audio and recipe.clock):
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
        if recipe.system_message == "" and recipe.template not in TEMPLATES:
            raise UserError(f'{recipe.template}: decides on system messages itself; leave --system-message "" out')

    def make(self, row: Row, source: PartSource | None = None) -> Sample:
        """The sample of one row of `source` (which may set an image root and a limit of tiles).

        Raises `Rejected`: `row.fault`, reasons of `parse_conversation`, `image_size`, `video_facts`, `choose_frames`,
        `sound_length`; path_outside_root, remote_image, remote_video, remote_audio, frames_differ, too_short_audio,
        too_many_tokens.
        """
        if row.fault:
            raise Rejected(*row.fault)
        conversation = parse_conversation(row.record, self.reserved, self.markup.gap, self.senses)
        messages = conversation.messages
        if messages[0].role == SYSTEM and not self.template.has_system:
            raise Rejected("bad_roles", f"chat template {self.template.name!r} has no system turn")
        check_forms(messages, conversation.tools, self.template)
        if self.template.pair:
            _check_pair(messages, conversation.images, self.template)
        if self.recipe.system_message and messages[0].role != SYSTEM:
            messages = (Message(SYSTEM, self.recipe.system_message), *messages)
        measured = (self._measure(reference, row, source) for reference in conversation.images)
        heard = self.recipe.use_audio_in_video if conversation.hears_videos is None else conversation.hears_videos
        filmed = (self._film(reference, row, source, heard) for reference in conversation.videos)
        marks = [mark for message in conversation.messages for mark in MARKS.findall(message.words)]
        images = tuple(next(measured) if mark == IMAGE_MARK else next(filmed) for mark in marks if mark != AUDIO_MARK)
        sounds = tuple(self._hear(reference, row, source) for reference in conversation.sounds)
        tiling = self.recipe.tiling
        if source and source.max_tiles:
            tiling = replace(tiling, max_tiles=source.max_tiles)
        content = Content(messages, images, tiling, conversation.tools, sounds)
        sample, limit = self._prepare(content), self.recipe.max_tokens
        if limit is None or sample.length <= limit:
            return sample
        for method, form in shorter(content, self.recipe.shorten):
            made = self._prepare(form)
            if made.length <= limit:
                return replace(made, shortened=method)
        raise Rejected("too_many_tokens", f"{sample.length} tokens, limit {limit} (--max-tokens)")

    def _measure(self, reference: str, row: Row, source: PartSource | None) -> ImageFile:
        recipe = self.recipe
        root = (source and source.root) or recipe.image_root or Path()
        path, place = locate(reference, row, root)
        file = source.file if source and place else root / path
        size = image_size(file, recipe.max_pixels, recipe.decode_images, place)
        return ImageFile(path, size, place, self._crcs([file], place))

    def _crcs(self, files: Sequence[Path], place: Place, what: str = "image") -> tuple[int, ...]:
        if not self.recipe.image_checksums:
            return ()
        try:
            return tuple(crc_of(file, place) for file in files)
        except (OSError, UserError, ValueError) as error:  # changed since it was measured
            raise Rejected(f"unreadable_{what}", str(error)[:200]) from error

    def _film(
        self, reference: VideoReference, row: Row, source: PartSource | None, heard: bool
    ) -> TiledImage | HeardVideo:
        """A video with its sampled frames and grid, which do not depend on other images, and, if it has some and that
        is to be `heard`, its sound."""
        recipe, has_sound = self.recipe, False
        assert recipe.video is not None
        if recipe.video.refused:
            raise Rejected("unsupported_media", recipe.video.refused)
        root = (source and source.root) or recipe.image_root or Path()
        located = [locate(file, row, root, "video") for file in reference.files]
        path, place = located[0]
        if reference.times:
            if any(place for _, place in located):
                raise Rejected(
                    "unsupported_media", "frames inside a file; a video inside it, or frames next to it, are read"
                )
            film = choose_frames(recipe.video, reference.times, reference.rate, files=[path for path, _ in located])
            files = [root / file for file in film.files]
            path, size = film.files[0], self._size_of_frames(files)
        else:
            file = source.file if source and place else root / path
            facts = video_facts(file, place, recipe.max_pixels)
            film, size = choose_frames(recipe.video, facts.times, facts.rate, facts.seconds), facts.size
            has_sound = facts.has_sound
            files = [file]
            if recipe.decode_images:
                _decode(file, place, film.frames)
        columns, rows = frame_grid(recipe.video, len(film.frames), size, recipe.tiling.tile_size)
        video = TiledImage(path, columns, rows, False, place=place, film=film, crcs=self._crcs(files, place, "video"))
        return self._with_sound(video, files[0]) if heard and has_sound else video

    def _with_sound(self, video: TiledImage, file: Path) -> HeardVideo:
        clock, film = self.recipe.clock, video.film
        assert clock is not None
        assert film is not None
        sound = self._sound(video.path, file, video.place, video.crcs)
        seen = len(self.rule.order(video, self.recipe.tokens_per_tile)) // video.steps
        turns = token_turns(clock, video.steps, seen, film.seconds, sound.tokens)
        return HeardVideo(video, replace(sound, turns=turns))

    def _hear(self, reference: str, row: Row, source: PartSource | None) -> Sound:
        root = (source and source.root) or self.recipe.image_root or Path()
        path, place = locate(reference, row, root, "audio")
        file = source.file if source and place else root / path
        return self._sound(path, file, place)

    def _sound(self, path: str, file: Path, place: Place, crcs: tuple[int, ...] | None = None) -> Sound:
        """`crcs`: of the file, if they are known."""
        rule = self.recipe.audio
        assert rule is not None
        samples = sound_length(file, place, rule.rate, self.recipe.decode_images)
        if not (tokens := rule.tokens(samples)):
            raise Rejected("too_short_audio", f"{file}: {samples / rule.rate:.3f} seconds are too short to be heard")
        crcs = self._crcs([file], place, "audio") if crcs is None else crcs
        return Sound(path, samples, rule.frames(samples), tokens, place, crcs)

    def _size_of_frames(self, files: Sequence[Path]) -> tuple[int, int]:
        sizes = {image_size(file, self.recipe.max_pixels, self.recipe.decode_images): file for file in files}
        if len(sizes) > 1:
            (one, first), (other, second) = list(sizes.items())[:2]
            raise Rejected(
                "frames_differ", f"{first}: {one[0]} x {one[1]} pixels, {second}: {other[0]} x {other[1]}; scale one"
            )
        return next(iter(sizes))

    def _prepare(self, content: Content) -> Sample:
        images, sounds = content.tiled(), content.heard()
        places: list[Places | HeardTurns] = [self.rule.places(image) for image in images]
        for sound in sounds:
            if sound.turns:
                places[sound.video] = HeardTurns(len(sound.turns))
        shown = [
            image.film.times if image.film and isinstance(place, Places) else place
            for image, place in zip(images, places, strict=True)
        ]
        adds_system = self.recipe.system_message is None
        chat = render_chat(content.messages, self.template, self.markup, shown, content.tools, adds_system)
        tokens, loss_mask = tokenize(chat, self.tokenizer)
        features = sum(len(self.rule.order(image, self.recipe.tokens_per_tile)) for image in images)
        written = sum(place.count for place in places) + sum(not sound.turns for sound in sounds)
        added = features + sum(sound.tokens for sound in sounds) - written
        return Sample(tokens, loss_mask, images, len(tokens) + added, sounds)


def _check_pair(messages: Sequence[Message], images: Sequence[str], template: ChatTemplate) -> None:
    if len(messages) > 2:
        raise Rejected(
            "several_turns", f"{len(messages)} turns; chat template {template.name!r} has a question and its answer"
        )
    if not images:
        raise Rejected("no_image", f"chat template {template.name!r} has no question without an image")


def _decode(file: Path, place: Place, numbers: Sequence[int]) -> None:
    try:
        for _ in read_frames(file, place, numbers, strict=True):
            pass
    except Exception as error:  # a broken file makes FFmpeg raise nearly anything
        raise Rejected("truncated_video", f"{file}: {str(error)[:200]}") from error


def locate(reference: str, row: Row, root: Path, what: str = "image") -> tuple[str, Place]:
    """(path below the root, ()) of an image or video file, or (name, place) of one inside the input file.

    Raises `Rejected`: remote_image, unreadable_image (`what` in place of image), path_outside_root.
    """
    if reference in row.images:
        return reference, row.images[reference]
    if reference.startswith("data:"):
        place = embedded(reference, row)
        if place is None:
            raise Rejected(
                f"unreadable_{what}", f"{reference[:40]!r}... is no base64 that stands in the file unescaped"
            )
        return "", place
    if reference.startswith(("http://", "https://")):
        raise Rejected(f"remote_{what}", f"{reference[:200]!r}: nothing is downloaded; fetch it and name the file")
    path = reference.removeprefix("file://")
    for folder in (root.absolute(), root.resolve()) if path.startswith("/") else ():
        path = path.removeprefix(f"{str(folder).rstrip('/')}/")
    return path_below_root(path), ()


open_recipe = cache(SampleMaker)  # one tokenizer per process


def tokenize(chat: RenderedChat, tokenizer: ChatTokenizer) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Token ids int32 [T] of a rendered chat; loss mask uint8 [T], 1 for tokens with a trained character."""
    encoding = _encoded(chat, tokenizer)
    loss_mask = np.zeros(len(encoding.ids), dtype=np.uint8)
    for start, end in chat.trained:
        loss_mask[encoding.covers(start, end)] = 1
    return encoding.ids, loss_mask


def _encoded(chat: RenderedChat, tokenizer: ChatTokenizer) -> TokenizedText:
    """Tokenise the text between cuts separately; character ranges are in the entire text."""
    parts = []
    for start, end in pairwise((0, *chat.cuts, len(chat.text))):
        part = tokenizer.encode(chat.text[start:end])
        parts.append(TokenizedText(part.ids, part.starts + start, part.ends + start))
    return TokenizedText(*map(np.concatenate, zip(*parts, strict=True)))
