"""A chat template as a program: Jinja, run in a sandbox as transformers' `apply_chat_template` runs it."""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache, lru_cache
from json import dumps, loads
from typing import Any

from jinja2 import TemplateError
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron.vlm.data.rejects import Rejected
from megatron.vlm.data.turns import SYSTEM, Message, as_json
from omnibal_ext.errors import UserError

TAG, DATE = "\U0010fffd", "\U0010fffc"
"""Characters of no meaning: where `{% generation %}` begins and ends, and the day's date."""
GENERATION = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")


class _Sandbox(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """Values of `loop` are harmless, and to check each takes long."""
        if type(obj) is LoopContext and hasattr(LoopContext, attribute) and not attribute.startswith("_"):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda _: DATE}
    environment.filters["tojson"] = _tojson
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, **spaces: Any) -> str:
    return dumps(value, ensure_ascii=ensure_ascii, **spaces) if ensure_ascii or spaces else as_json(value)


_tool = lru_cache(2**10)(loads)  # mostly the same in many conversations


def _refuse(message: str) -> None:
    raise TemplateError(message)


class ChatProgram:
    """A compiled chat template; `variables` are what it knows besides the conversation, such as `bos_token`.

    `first` is the token that the tokenizer puts before a text ("": none). Raises UserError naming `where` if `source`
    is no Jinja.
    """

    def __init__(self, source: str, where: str, variables: Mapping[str, str] | None = None, first: str = "") -> None:
        self.where, self.first, self.variables = where, first, dict(variables or {})
        tag = r"{%\1 if true %}{{ generation_tag }}{% endif \2%}"
        source, tags = GENERATION.subn(tag, source)
        self.has_tags = tags > 0
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise UserError(f"{where}: is no chat template: {error}") from error

    def run(
        self, messages: Sequence[Message], tools: Sequence[str], parts: Collection[str] = (), **variables: Any
    ) -> str:
        """The text of a conversation, with `TAG` where a `{% generation %}` begins or ends and `DATE` for a date.

        `tools` are JSON texts; contents of the roles `parts` are lists. Raises `Rejected` (unsupported_field) if the
        program refuses the conversation.
        """
        told = {
            "messages": [_as_openai(message, message.role in parts) for message in messages],
            "tools": [_tool(tool) for tool in tools] or None,
            "generation_tag": TAG,
        }
        try:
            text = self._template.render(**self.variables, **told, **variables)
        except Exception as error:  # another's program may raise anything
            detail = " ".join(str(error).split())[:200]
            raise Rejected("unsupported_field", f"refuses it: {detail}") from error
        return text if text.startswith(self.first) else self.first + text


def _as_openai(message: Message, as_parts: bool) -> dict[str, Any]:
    """A message as `apply_chat_template` takes it; without words the content is ""."""
    content: Any = message.words
    if as_parts and content:
        texts = message.parts if message.role == SYSTEM and message.parts else (content,)
        content = [{"type": "text", "text": text} for text in texts]
    told = {"role": message.role, "content": content}
    if message.calls:
        told["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.calls
        ]
    if message.reasoning is not None:
        told["reasoning_content"] = message.reasoning
    return told
