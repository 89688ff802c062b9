"""What a model says about its data: flags of preprocessing that it decides, and the tokenizer that it reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.vlm.data.samples import SampleMaker
from megatron.vlm.data.templates import chat_template
from megatron.vlm.data.tiles import RULES
from megatron.vlm.data.tokenizer import load_tokenizer, model_tokenizer
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.huggingface import config_path, read_config
from omnibal_ext.architectures.presets import PRESETS, preset
from omnibal_ext.errors import UserError

USUAL = {
    "tiling": "internvl",
    "tile-size": 448,
    "tokens-per-tile": 256,
    "normalize": "imagenet",
    "image-markup": "internvl",
}
"""Where neither flag nor model says otherwise."""


def needs(architecture: Architecture, folder: Path | None) -> dict[str, Any]:
    """Flag of preprocessing -> the value that fits a model; None where it does not say.

    `folder` is the model's own, with processor and tokenizer, where there is one.
    """
    return {
        "tiling": _tiling(architecture.prompt.tiling, folder),
        "tile-size": architecture.vision.image_size,
        "tokens-per-tile": architecture.image_tokens_per_tile,
        "normalize": architecture.vision.pixels,
        "image-markup": architecture.prompt.image_markup,
        "chat-template": architecture.prompt.chat_template,
        "tokenizer-model": model_tokenizer(folder) if folder else None,
    }


def settle(given: Mapping[str, Any], model: str | None) -> dict[str, Any]:
    """Every flag's value: what the user gave, else what the model needs, else the usual.

    Raises UserError where a flag contradicts the model, naming both values, or where nobody says one that must be.
    """
    wanted = needs(preset(model), model_folder(model)) if model else {}
    for flag, value in given.items():
        if value is not None and wanted.get(flag) is not None and not fits(flag, value, wanted[flag]):
            raise UserError(f"--{flag} {value}, but model {model!r} needs {wanted[flag]}; leave --{flag} out")
    settled = {**USUAL, **_said(wanted), **_said(given)}
    for flag in ("tokenizer-model", "chat-template"):
        if flag not in settled:
            who = f"model {model!r} does not say which" if model else "--model would say which"
            raise UserError(f"--{flag} is missing, and {who}")
    return settled


def check_tokenizer(maker: SampleMaker, model: str) -> None:
    """Refuse a tokenizer whose ids are not the model's.

    Raises UserError naming tokenizer and model if ids reach behind its vocabulary, images have another token, or the
    tokenizer in the model's folder has another vocabulary.
    """
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
    own = model_tokenizer(folder) if folder else None
    if own and (difference := tokenizer_difference(maker.special_tokens, ours.vocabulary_hash(), own)):
        raise UserError(
            f"{path}: not the tokenizer {own} of model {model!r}: {difference}; leave --tokenizer-model out"
        )


def tokenizer_difference(special_tokens: Mapping[str, int], vocabulary_hash: str, file: Path) -> str:
    """In what the tokenizer of a file differs: from ids of special tokens, from a vocabulary by its hash; or ""."""
    tokenizer = load_tokenizer(file, tuple(special_tokens))
    for token, number in special_tokens.items():
        if tokenizer.token_id(token) != number:
            return f"{token} is {number}, not {tokenizer.token_id(token)}"
    return "" if tokenizer.vocabulary_hash() == vocabulary_hash else "another vocabulary"


def model_folder(model: str) -> Path | None:
    """The Hugging Face folder that a model's name is, if it is one."""
    if model in PRESETS or not Path(model).exists():
        return None
    return config_path(Path(model)).parent


def _tiling(rule: str, folder: Path | None) -> str:
    """A model's rule; how LLaVA-1.5 brings an image to a square, the processor in its folder says if there is one."""
    if rule != "pad" or folder is None or not (path := folder / "preprocessor_config.json").is_file():
        return rule
    config = read_config(path)
    return "crop" if config.get("do_center_crop") and not config.get("do_pad") else rule


def fits(flag: str, given: Any, wanted: Any) -> bool:
    """Whether a flag's value serves a model that needs `wanted`."""
    match flag:
        case "tiling":  # any rule serves a model that reads tile by tile, only one serves a model that joins them
            return given in RULES and RULES[given].joins_tiles == RULES[wanted].joins_tiles
        case "chat-template":
            return chat_template(given).writes_as(chat_template(wanted))
        case "tokenizer-model":  # several files can hold one tokenizer: compared when open
            return True
        case _:
            return bool(given == wanted)


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    return {flag: value for flag, value in values.items() if value is not None}
