"""The chat template in a model's folder, recognised by what it writes: ours that writes every probe in the same way.

A folder's template is a Jinja program. It is run as transformers runs it, in a sandbox, on a few conversations; a
template of ours that gives the same text for all of them is the model's, however the program is spelled.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.vlm.data.markup import MARKUPS
from megatron.vlm.data.templates import ASSISTANT, SYSTEM, TEMPLATES, USER, ChatTemplate, Message, render_chat
from omnibal_ext.architectures.huggingface import read_config
from omnibal_ext.errors import UserError

JINJA, JSON, TOKENIZER = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Transformers' own marks around the assistant's words: they write nothing."""
PROBES = (
    (Message(USER, "What is it?"), Message(ASSISTANT, "A cat.")),
    (
        Message(USER, "One\ntwo: 3"),
        Message(ASSISTANT, "Four."),
        Message(USER, "And?"),
        Message(ASSISTANT, "So.\n\nYes"),
    ),
    (Message(SYSTEM, "Be brief."), Message(USER, "Why?"), Message(ASSISTANT, "Because.")),
)
"""One turn, several, and one with a system message."""


def folder_template(folder: Path) -> tuple[str, str] | None:
    """Name of our template that writes as the folder's own, and the file that holds the latter; None without one.

    Raises UserError naming the file if it is damaged or none of ours writes so.
    """
    found = _source(folder)
    if found is None:
        return None
    source, file = found
    written = _Program(source, folder / file, _special_tokens(folder), _first_token(folder))
    for template in TEMPLATES.values():
        if all(written.agrees(template, probe) for probe in PROBES):
            return template.name, file
    raise UserError(
        f"{folder / file}: writes conversations as none of {', '.join(TEMPLATES)} does; if one of them is meant all "
        "the same, name it with --chat-template"
    )


def _source(folder: Path) -> tuple[str, str] | None:
    """The program and the file it is in, in the order in which transformers' processors look."""
    if (folder / JINJA).is_file():
        return (folder / JINJA).read_text(encoding="utf-8"), JINJA
    for name in (JSON, TOKENIZER):
        template = read_config(folder / name).get("chat_template") if (folder / name).is_file() else None
        if isinstance(template, list):  # several by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if template:
            return str(template), name
    return None


def _special_tokens(folder: Path) -> dict[str, str]:
    """`bos_token` and the like, which templates write by these names."""
    config = read_config(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else {}
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: config.get(name) for name in names}
    return {name: str(token["content"] if isinstance(token, dict) else token or "") for name, token in tokens.items()}


def _first_token(folder: Path) -> str:
    """What the tokenizer itself puts before a text; nothing, where its files do not say so."""
    config = read_config(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else {}
    if config.get("add_bos_token") is not None:
        return _special_tokens(folder)["bos_token"] if config["add_bos_token"] else ""
    path = folder / "tokenizer.json"
    steps = (read_config(path).get("post_processor") or {}) if path.is_file() else {}
    singles = [step["single"] for step in (steps, *steps.get("processors", ())) if "single" in step]
    first = singles[0][0] if singles and singles[0] else {}
    return str(first["SpecialToken"]["id"]) if "SpecialToken" in first else ""


class _Program:
    """A template of Hugging Face's, ready to run."""

    def __init__(self, source: str, where: Path, tokens: Mapping[str, str], first: str) -> None:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise UserError(f"{where}: reading it needs a package that is not installed: pip install jinja2") from error
        self.tokens, self.first, self.errors = tokens, first, TemplateError
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = self._refuse
        try:
            self.template = environment.from_string(GENERATION.sub("", source))
        except TemplateError as error:
            raise UserError(f"{where}: is no chat template: {error}") from error

    def _refuse(self, message: str) -> None:
        raise self.errors(message)

    def agrees(self, template: ChatTemplate, probe: Sequence[Message]) -> bool:
        """Whether a template of ours writes a conversation as the folder's template and tokenizer do."""
        known = all(message.role in template.turns for message in probe)
        spoken = probe
        if known and template.system and probe[0].role != SYSTEM:
            spoken = (Message(SYSTEM, template.system), *probe)
        theirs = self._written(probe)
        if not known:  # a role that the model never saw is refused, or passes unread
            return theirs is None or all(message.words not in theirs for message in probe if message.role == SYSTEM)
        ours = render_chat(spoken, template, MARKUPS["internvl"]).text
        return theirs is not None and ours == (theirs if theirs.startswith(self.first) else self.first + theirs)

    def _written(self, probe: Sequence[Message]) -> str | None:
        """What the folder's template makes of a conversation: contents are lists in processors, texts in tokenizers."""
        for wrap in (_parts, str):
            messages = [{"role": message.role, "content": wrap(message.words)} for message in probe]
            try:
                text: str = self.template.render(messages=messages, add_generation_prompt=False, **self.tokens)
            except (self.errors, TypeError):
                continue
            if all(message.words.strip() in text for message in probe) and "{'type'" not in text:
                return text
        return None


def _parts(words: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": words}]
