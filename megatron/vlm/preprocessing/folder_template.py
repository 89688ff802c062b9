"""Recognise the chat template of a model's folder by its output on a few probe conversations.

The folder's Jinja template is run as transformers runs it, in a sandbox; our template that gives the same text for
every probe is used. Tools may be in any of a folder's templates, as servers assume: Qwen2.5-VL's tokenizer has a form
for them, its processor none.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from megatron.vlm.data.markup import MARKUPS
from megatron.vlm.data.templates import TEMPLATES, ChatTemplate, render_chat
from megatron.vlm.data.tool_forms import Call
from megatron.vlm.data.turns import ASSISTANT, SYSTEM, TOOL, USER, Message
from omnibal_ext.architectures.folder import read_config
from omnibal_ext.errors import UserError

JINJA, JSON, TOKENIZER = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
GENERATION = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""transformers' marks around the assistant's words, which render nothing."""


class Probe(NamedTuple):
    """A conversation and its tools."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()


PROBES = (
    Probe((Message(USER, "What is it?"), Message(ASSISTANT, "A cat."))),
    Probe(
        (
            Message(USER, "One\ntwo: 3"),
            Message(ASSISTANT, "Four."),
            Message(USER, "And?"),
            Message(ASSISTANT, "So.\n\nYes"),
        )
    ),
    Probe((Message(SYSTEM, "Be brief."), Message(USER, "Why?"), Message(ASSISTANT, "Because."))),
)
"""One question, several, and one with a system message."""
CALLS = (Call("look", {"at": "Zürich <b>", "days": [2, 1], "wet": True}), Call("wait", {}))
LOOK = {"type": "function", "function": {"name": "look", "description": "Sees <all>", "parameters": {"z": 1, "a": "é"}}}
WAIT = {"type": "function", "function": {"name": "wait"}}
TOOL_PROBES = (
    Probe(
        (
            Message(SYSTEM, "Be brief."),
            Message(USER, "Rain?"),
            Message(ASSISTANT, "Let me see.", calls=CALLS),
            Message(TOOL, "wet"),
            Message(TOOL, "dry"),
            Message(ASSISTANT, "Both."),
            Message(USER, "Sure?"),
            Message(ASSISTANT, "Yes."),
        ),
        (LOOK, WAIT),
    ),
    Probe(
        (
            Message(USER, "Rain?"),
            Message(ASSISTANT, "", calls=CALLS[:1]),
            Message(TOOL, "wet"),
            Message(ASSISTANT, "", calls=CALLS[1:]),
            Message(TOOL, "dry"),
            Message(ASSISTANT, "Dry."),
        ),
        (LOOK,),
    ),
    Probe((Message(USER, "Rain?"), Message(ASSISTANT, "", calls=CALLS))),
)
"""Calls with and without words, one and several results, with and without a system message."""
REASONING_PROBES = (
    Probe(
        (
            Message(USER, "One?"),
            Message(ASSISTANT, "Two.", reasoning="1 + 1"),
            Message(USER, "Rain?"),
            Message(ASSISTANT, "Let me see.", calls=CALLS, reasoning="I have to look."),
            Message(TOOL, "wet"),
            Message(ASSISTANT, "", calls=CALLS[1:]),
            Message(TOOL, "dry"),
            Message(ASSISTANT, "Dry.", reasoning="The last one counts."),
        ),
        (LOOK,),
    ),
)
"""Reasoning about an earlier question and between calls; turns without any."""


def folder_template(folder: Path) -> tuple[str, str] | None:
    """(name of our template, name of the folder's template file); None if the folder has no template.

    Raises UserError naming the file if it is damaged or none of ours gives the same text.
    """
    sources = list(_sources(folder))
    if not sources:
        return None
    tokens, first = _special_tokens(folder), _first_token(folder)
    told, file = _Program(*sources[0], tokens, first), sources[0][1]
    programs = [told]
    for source in sources[1:]:
        with suppress(UserError):  # transformers would not run these
            programs.append(_Program(*source, tokens, first))
    for template in sorted(TEMPLATES.values(), key=lambda template: template.tools is None):
        if not all(told.agrees(template, probe) for probe in PROBES):
            continue
        asked = (TOOL_PROBES if template.tools else ()) + (REASONING_PROBES if template.reasoning else ())
        asked = tuple(probe for probe in asked if template.tools or not probe.tools)
        if any(all(program.agrees(template, probe) for probe in asked) for program in programs):
            return template.name, file.name
    raise UserError(
        f"{file}: writes conversations as none of {', '.join(TEMPLATES)} does; if one of them is meant all "
        "the same, name it with --chat-template"
    )


def _sources(folder: Path) -> Iterator[tuple[str, Path]]:
    """(template, file), in the order in which transformers' processors look for them."""
    if (folder / JINJA).is_file():
        yield (folder / JINJA).read_text(encoding="utf-8"), folder / JINJA
    for name in (JSON, TOKENIZER):
        template = read_config(folder / name).get("chat_template") if (folder / name).is_file() else None
        if isinstance(template, list):  # several by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if template:
            yield str(template), folder / name


def _special_tokens(folder: Path) -> dict[str, str]:
    """`bos_token` and so on, variables of templates."""
    config = read_config(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else {}
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: config.get(name) for name in names}
    return {name: str(token["content"] if isinstance(token, dict) else token or "") for name, token in tokens.items()}


def _first_token(folder: Path) -> str:
    """The token that the tokenizer puts before a text, or ""."""
    config = read_config(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else {}
    if config.get("add_bos_token") is not None:
        return _special_tokens(folder)["bos_token"] if config["add_bos_token"] else ""
    path = folder / "tokenizer.json"
    steps = (read_config(path).get("post_processor") or {}) if path.is_file() else {}
    singles = [step["single"] for step in (steps, *steps.get("processors", ())) if "single" in step]
    first = singles[0][0] if singles and singles[0] else {}
    return str(first["SpecialToken"]["id"]) if "SpecialToken" in first else ""


class _Program:
    """A compiled Jinja chat template."""

    def __init__(self, source: str, where: Path, tokens: Mapping[str, str], first: str) -> None:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        self.tokens, self.first, self.errors = tokens, first, TemplateError
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = self._refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = _as_json
        try:
            self.template = environment.from_string(GENERATION.sub("", source))
        except TemplateError as error:
            raise UserError(f"{where}: is no chat template: {error}") from error

    def _refuse(self, message: str) -> None:
        raise self.errors(message)

    def agrees(self, template: ChatTemplate, probe: Probe) -> bool:
        """Whether our template renders a conversation as the folder's template and tokenizer do."""
        messages = probe.messages
        known = all(message.role in (*template.turns, TOOL) for message in messages)
        theirs = self._written(probe)
        if not known:  # an unsupported role is refused, or not rendered
            return all(one.words not in text for text in theirs for one in messages if one.role == SYSTEM)
        if template.system and messages[0].role != SYSTEM:
            messages = (Message(SYSTEM, template.system), *messages)
        tools = [_as_json(tool) for tool in probe.tools]
        ours = render_chat(messages, template, MARKUPS["internvl"], tools=tools).text
        if template.closed_by_user and messages[-1].role == ASSISTANT:
            ours = ours.removesuffix(template.end_of_turn)
        if template.system_varies and messages[0].role != SYSTEM:
            theirs = [_without_system(text, template) for text in theirs]
        return ours in [text if text.startswith(self.first) else self.first + text for text in theirs]

    def _written(self, probe: Probe) -> list[str]:
        """The folder's renderings. Contents are lists of parts for processors, where the system's may be a text, and
        texts for tokenizers."""
        parts = [self._rendered(probe, ()), self._rendered(probe, (SYSTEM,))]
        if all(text is None for text in parts):
            parts = [self._rendered(probe, (SYSTEM, USER, ASSISTANT, TOOL))]
        return [text for text in parts if text is not None]

    def _rendered(self, probe: Probe, as_text: Sequence[str]) -> str | None:
        """With contents as texts for these roles and lists for others; None if the template does not support that."""
        messages = [_as_openai(one, str if one.role in as_text else _parts) for one in probe.messages]
        told: dict[str, Any] = {"messages": messages, "tools": list(probe.tools) or None, **self.tokens}
        try:
            text: str = self.template.render(add_generation_prompt=False, **told)
        except (self.errors, TypeError):
            return None
        is_whole = all(message.words.strip() in text for message in probe.messages) and "{'type'" not in text
        return text if is_whole else None


def _without_system(text: str, template: ChatTemplate) -> str:
    """Remove the system message that a text begins with."""
    turn = template.turns[SYSTEM]
    before, opening, rest = text.partition(turn.opening)
    if not opening or before != template.beginning:
        return text
    return before + rest.partition(turn.end + turn.gap)[2]


def _as_openai(message: Message, wrap: Callable[[str], Any]) -> dict[str, Any]:
    """A message as `apply_chat_template` takes it; without words the content is ""."""
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.calls
    ]
    said = {"tool_calls": calls, "reasoning_content": message.reasoning}
    content = wrap(message.words) if message.words else ""
    return {"role": message.role, "content": content, **{name: value for name, value in said.items() if value}}


def _as_json(value: Any, ensure_ascii: bool = False, **spaces: Any) -> str:
    """transformers' `tojson`: Jinja's escapes HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **spaces)


def _parts(words: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": words}]
