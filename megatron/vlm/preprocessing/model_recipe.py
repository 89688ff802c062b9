"""Settings of preprocessing that follow from a model, and the check of its tokenizer.

In order of precedence: the user's flags, the files of the model's folder, the model's architecture and family,
defaults. What the model cannot read otherwise (tiles, tokens per tile, the text around an image) cannot be changed: a
contradicting flag is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.preprocessing.folder_files import FlagValue, folder_settings
from megatron.vlm.preprocessing.measures.registry import RULES
from megatron.vlm.preprocessing.recipe import Recipe
from megatron.vlm.preprocessing.samples import SampleMaker
from megatron.vlm.preprocessing.tokenizer import load_tokenizer, model_tokenizer
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.folder import find_config
from omnibal_ext.architectures.presets import preset
from omnibal_ext.errors import UserError
from omnibal_ext.families.media import TILINGS, VIDEO_RULES
from omnibal_ext.families.registry import family_of
from omnibal_ext.families.towers.video_rules import MOST_FRAMES_SEEN
from omnibal_ext.modalities.modality import FURTHER
from omnibal_ext.modalities.vision.tiling import FRAMES
from omnibal_ext.preprocess_flags import DEFAULTS

STRUCTURE = ("tiling", "tile-size", "tokens-per-tile", "normalize", "image-markup")
"""Settings that the weights depend on: a dataset with others does not fit the model."""


def model_settings(architecture: Architecture, folder: Path | None, with_template: bool = True) -> dict[str, FlagValue]:
    """Return value and origin of each preprocessing flag that a model decides.

    `folder`: the model's Hugging Face folder, if it has one. Raises UserError naming an unsupported file and field of
    it.
    """
    tiles = architecture.least_tiles
    prompt, origin = architecture.prompt, "config.json" if folder else "the preset"
    known = {
        "tiling": prompt.tiling,
        "tile-size": architecture.vision.image_size,
        "tokens-per-tile": architecture.image_tokens(tiles) if tiles == 1 else architecture.image_tokens(tiles) / tiles,
        "normalize": architecture.vision.pixels,
        "image-markup": prompt.image_markup,
        "chat-template": prompt.chat_template,
        **TILINGS[prompt.tiling].usual,
        "video": VIDEO_RULES.get(prompt.image_markup),
        **{one.modality.name: RULES[one.modality].of_model(architecture) for one in architecture.further},
        "clock": architecture.vision.native.clock if architecture.vision.native else None,
    }
    by_model = {flag: FlagValue(value, origin) for flag, value in known.items() if value is not None}
    # A template in config.json takes precedence: InternVL's tokenizers came with others, LLaVA's processors with one
    # that ends no turn.
    named = prompt.chat_template is not None and not family_of(architecture).folder_says_template
    asks = with_template and not named
    return by_model | (folder_settings(folder, architecture, asks) if folder else {})


def resolve_settings(given: Mapping[str, Any], model: str | None) -> dict[str, FlagValue]:
    """Return the value of every flag: the user's, else the model's (`model_settings`), else the default.

    Raises UserError naming both values if a flag contradicts the model, or if a required one is missing.
    """
    flags = {flag: FlagValue(value, f"--{flag}") for flag, value in given.items() if value is not None}
    wanted = model_settings(preset(model), model_folder(model), "chat-template" not in flags) if model else {}
    for flag in STRUCTURE:
        if flag in flags and flag in wanted and not is_compatible(flag, flags[flag].value, wanted[flag].value):
            raise UserError(
                f"--{flag} {flags[flag].value}, but model {model!r} needs {wanted[flag].value} "
                f"({wanted[flag].origin}); leave --{flag} out"
            )
    settled = {flag: FlagValue(value, "usual") for flag, value in DEFAULTS.items()} | wanted | flags
    if "tokenizer-model" not in settled:
        made = "of vocab.json and merges.txt transformers' AutoTokenizer makes it, and save_pretrained writes it"
        put = f"copy the model's tokenizer.json or tokenizer.model into {model} ({made})"
        remedy = put if model else "give --model"
        raise UserError(f"there is no tokenizer: {remedy}, or name one by --tokenizer-model of omnibal preprocess")
    if "chat-template" not in settled:
        remedy = f"copy the model's chat_template.jinja into {model}" if model else "give --model, which says it"
        raise UserError(
            f"there is no chat template: {remedy}, or name one (docs/chat-templates.md) by --chat-template of omnibal "
            "launch or preprocess"
        )
    return settled


def with_pixels(choices: dict[str, FlagValue], most: int | None) -> dict[str, FlagValue]:
    """Return the settings with --max-tiles for `most` pixels an image. Raises UserError for tiles of a fixed size."""
    if most is None:
        return choices
    side, tiling = choices["tile-size"].value, choices["tiling"].value
    if not TILINGS[tiling].native:
        raise UserError(f"--max-pixels {most}: images become tiles of {side} pixels a side here; give --max-tiles")
    if most < (least := choices["min-tiles"].value * side**2):
        raise UserError(f"--max-pixels {most}: must be at least {least}, the fewest of an image; give more")
    return choices | {"max-tiles": FlagValue(most // side**2, "--max-pixels")}


def with_video(choices: dict[str, FlagValue], flags: Mapping[str, Any]) -> dict[str, FlagValue]:
    """Return the settings, the video rule changed by flags. Raises UserError if there is none, or it ignores one."""
    if not flags:
        return choices
    if "video" not in choices:
        raise UserError("--video-fps and --video-max-frames are for models that see videos; name one with --model")
    known = choices["video"].value
    for name in sorted(flags.keys() - set(known.obeys)):
        flag, sampling = f"--video-{name.replace('_', '-')}", known.sampling
        raise UserError(f"{flag}: how many frames this model sees goes {sampling} of the video; leave it out")
    rule = replace(known, **flags)
    if not FRAMES <= rule.max_frames <= MOST_FRAMES_SEEN:
        raise UserError(f"--video-max-frames {rule.max_frames}: must be {FRAMES} to {MOST_FRAMES_SEEN}")
    rule = replace(rule, min_frames=min(rule.min_frames, rule.max_frames))
    return choices | {"video": FlagValue(rule, f"flags and {choices['video'].origin}")}


def recipe_of(choices: Mapping[str, FlagValue], **others: Any) -> Recipe:
    """Make the recipe with these settings (flag -> value), and others of its fields."""
    chosen = {flag: choice.value for flag, choice in choices.items()}
    tiles = (chosen["tile-size"], chosen["min-tiles"], chosen["max-tiles"], chosen["thumbnail"], chosen["tiling"])
    return Recipe(
        tokenizer=chosen["tokenizer-model"],
        template=chosen["chat-template"],
        tiling=Tiling(*tiles),
        tokens_per_tile=chosen["tokens-per-tile"],
        normalization=chosen["normalize"],
        markup=chosen["image-markup"],
        video=chosen.get("video"),
        further=tuple(chosen[one.name] for one in FURTHER if one.name in chosen),
        clock=chosen.get("clock"),
        **others,
    )


def check_tokenizer(maker: SampleMaker, model: str) -> None:
    """Raise UserError naming tokenizer and model if ids exceed the model's vocabulary, the image token is another one,
    or the tokenizer in the model's folder has another vocabulary."""
    architecture, folder, ours = preset(model), model_folder(model), maker.tokenizer
    path, words = maker.recipe.tokenizer, architecture.language.vocab_size
    if ours.vocab_size > words:
        last = max(maker.special_tokens, key=lambda token: maker.special_tokens[token])
        raise UserError(
            f"{path}: ids reach {ours.vocab_size - 1} ({last!r} is {maker.special_tokens[last]}), model {model!r} has "
            f"{words} words; use the model's own tokenizer"
        )
    expected = architecture.prompt.image_token_id
    if expected not in (None, maker.image_token_id):
        raise UserError(
            f"{path}: {maker.markup.context!r} is token {maker.image_token_id}, model {model!r} has it at {expected}; "
            "use the model's own tokenizer"
        )
    for one, read in maker.further_tokens.items():
        expected = architecture.prompt.further_token_ids.get(one.size)
        if expected not in (None, read):
            raise UserError(
                f"{path}: {maker.markup.of(one).token!r} is token {read}, model {model!r} has it at {expected}; "
                "use the model's own tokenizer"
            )
    own = model_tokenizer(folder) if folder else None
    if own and (difference := tokenizer_difference(maker.special_tokens, ours.vocabulary_hash(), own)):
        raise UserError(
            f"{path}: not the tokenizer {own} of model {model!r}: {difference}; leave --tokenizer-model out"
        )


def tokenizer_difference(special_tokens: Mapping[str, int], vocabulary_hash: str, file: Path) -> str:
    """Return how the tokenizer of a file differs from these special tokens and this vocabulary; "" if it does not."""
    tokenizer = load_tokenizer(file, tuple(special_tokens))
    for token, number in special_tokens.items():
        if tokenizer.token_id(token) != number:
            return f"{token} is {number}, not {tokenizer.token_id(token)}"
    return "" if tokenizer.vocabulary_hash() == vocabulary_hash else "another vocabulary"


def model_folder(model: str) -> Path | None:
    """Return the model's Hugging Face folder, if its name is one."""
    found = find_config(Path(model))
    return found.parent if found else None


def is_compatible(flag: str, given: Any, wanted: Any) -> bool:
    """Return whether data made with a flag's value `given` fit a model that needs `wanted`."""
    if flag == "tiling":  # any rule serves a model that reads tile by tile, only one serves a model that joins them
        kinds = [TILINGS[rule].read_as for rule in (given, wanted) if rule in TILINGS]
        return len(kinds) == 2 and kinds[0] == kinds[1]
    return bool(given == wanted)
