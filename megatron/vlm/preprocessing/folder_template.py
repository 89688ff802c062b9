"""The chat template of a model's folder: its own program, or that of ours which writes the same.

Ours have names, in datasets and commands. Tools may be in any of a folder's templates, as servers assume: Qwen2.5-VL's
tokenizer has a form for them, its processor none.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.vlm.data.chat_program import REMEDY
from megatron.vlm.data.sandbox import DATE
from megatron.vlm.data.templates import CALL, CALLING, CHATS, LOOK, TOLD, ChatTemplate, chat_template
from megatron.vlm.data.turns import ASSISTANT, SYSTEM, TOOL, USER, Call, Message
from megatron.vlm.preprocessing.tokenizer_files import (
    CONFIG,
    TEMPLATE_FILES,
    TOKENIZER,
    is_special,
    read_neighbour,
    template_source,
    token_text,
)
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.families.markup import IMAGE_MARK, ImageMarkup, joined, media_first
from omnibal_ext.families.registry import TEMPLATES
from omnibal_ext.reading.costs import tried

SEES = Message(ASSISTANT, "Let me see.", calls=(CALL, Call("wait", {})))
CALLS = (*CALLING, CALLING[0], SEES, Message(TOOL, "wet"), Message(TOOL, "dry"), *CALLING[1:])
"""Calls with and without words, one and several results."""
THOUGHT = tuple(replace(one, reasoning="1 + 1") if n in (1, 5, 10) else one for n, one in enumerate(CALLS))
"""Reasoning about an earlier question and between calls; turns without any."""


PICTURES = ((IMAGE_MARK, " What? "), ("What?", IMAGE_MARK), ("From ", IMAGE_MARK, "\nto ", IMAGE_MARK, "\n?"))
"""Questions of several parts."""


def folder_template(folder: Path, markup: ImageMarkup | None = None) -> tuple[str, str] | None:
    """Return (name of our template or path of the folder's own, name of its file); None if the folder has no template.

    Ours is taken if it writes the same, for a model's `markup` also where questions have images as parts.

    Raises UserError naming the file if it is damaged, its program writes no conversations, or takes more time or memory
    than is allowed.
    """
    files = [folder / name for name in TEMPLATE_FILES if template_source(folder / name)]
    if not files:
        return None
    ours = sorted(map(chat_template, TEMPLATES), key=lambda one: not one.has_tools)  # once, not in every fork
    chosen = partial(_chosen, folder, files, ours, markup)
    name, file = tried(chosen, str(files[0]), REMEDY)
    return name, file


def _chosen(
    folder: Path, files: Sequence[Path], known: Sequence[ChatTemplate], markup: ImageMarkup | None
) -> tuple[str, str]:
    """Choose among `files` with templates and `known` ones of ours; return (name or path, name of the file)."""
    first = file_template(files[0], folder)
    own = {files[0]: first}
    for file in files[1:]:
        with suppress(UserError):  # transformers would not run these
            own[file] = file_template(file, folder)
    for ours in known:
        asked = (CALLS, (TOLD, *CALLS), THOUGHT)[: (2 + ours.has_reasoning) * ours.has_tools]
        if (
            _alike(ours, first, CHATS)
            and (markup is None or _pictures_alike(ours, first, markup))
            and any(_alike(ours, one, asked, ours.has_tools) for one in own.values())
        ):
            return ours.name, files[0].name
    file = next((file for file, one in own.items() if one.has_tools and _alike(one, first, CHATS)), files[0])
    own[file].check()
    return str(file), file.name


def _alike(ours: ChatTemplate, theirs: ChatTemplate, chats: Sequence[Sequence[Message]], tools: bool = False) -> bool:
    """Say whether both write the same, but for the end of the last answer and a system message with the day's date."""
    for chat in chats:
        our, their = (template.text(chat, [LOOK] * tools) for template in (ours, theirs))
        dated = chat[0].role != SYSTEM and DATE in (their or "")
        if our != their and not (our and their and (dated or our == their + ours.ending)):
            return False
    return True


def _pictures_alike(ours: ChatTemplate, theirs: ChatTemplate, markup: ImageMarkup) -> bool:
    """Say whether both write questions with images in the same places, or theirs takes none as parts."""
    for parts in PICTURES if theirs.images_first is not None else ():
        words = joined(media_first(parts) if markup.first else parts, markup.gap)
        chat = (Message(SYSTEM, "Be brief."), Message(USER, words, parts=parts), CALLING[-1])[not theirs.has_system :]
        with suppress(Rejected):  # such as a second image
            their = theirs.written(chat)[0]
            if not ours.written(chat)[0].startswith(their):
                return False
    return True


def open_template(named: str, tokenizer: Path) -> ChatTemplate:
    """Open a template of ours by name, or of a .jinja or .json file, for a tokenizer's file. Raises UserError."""
    file = Path(named)
    if named in TEMPLATES or file.suffix not in (".jinja", ".json"):
        return chat_template(named)
    folder = file.parent if (file.parent / CONFIG).is_file() else tokenizer.parent
    tried(lambda: _checked(file, folder).tokens, str(file), REMEDY)
    return _checked(file, folder)


def _checked(file: Path, folder: Path) -> ChatTemplate:
    template = file_template(file, folder)
    template.check()
    return template


def file_template(file: Path, folder: Path) -> ChatTemplate:
    """Open the program in a file, for the tokenizer of a folder. Raises UserError if it is missing, or no Jinja."""
    source = template_source(file)
    if not source:
        raise UserError(f"{file}: has no chat template; --chat-template names one of ours or a .jinja or .json file")
    config, tokenizer = read_neighbour(folder, CONFIG), read_neighbour(folder, TOKENIZER)
    known = {name: token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    added = [*config.get("added_tokens_decoder", {}).values(), *tokenizer.get("added_tokens", ())]
    special = {token_text(token) for token in added if is_special(token)} | {*known.values()} - {""}
    return ChatTemplate(str(file), source, sorted(special), variables=known, first=_first_token(config, tokenizer))


def _first_token(config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> str:
    """Return the token that the tokenizer puts before a text, or ""."""
    if config.get("add_bos_token") is not None:
        return token_text(config.get("bos_token")) if config["add_bos_token"] else ""
    steps = tokenizer.get("post_processor") or {}
    singles = [step["single"] for step in (steps, *steps.get("processors", ())) if "single" in step]
    first = singles[0][0] if singles and singles[0] else {}
    return str(first["SpecialToken"]["id"]) if "SpecialToken" in first else ""
