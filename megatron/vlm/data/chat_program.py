"""A chat template as a program: Jinja, run in a sandbox as transformers' `apply_chat_template` runs it."""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache, partial
from json import loads
from typing import Any

from megatron.vlm.data.sandbox import sandbox
from megatron.vlm.data.turns import USER, Message
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.families.markup import KINDS
from omnibal_ext.reading.costs import CostError, bounded

TAG = "\U0010fffd"
"""A character of no meaning, written where `{% generation %}` begins and ends."""
GENERATION = re.compile(r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}")
MOST_WRITTEN = 2**21
"""Characters that a template may write: twice the longest conversation."""
REMEDY = "write one (a .jinja file), or choose another, with --chat-template"

_tool = lru_cache(2**10)(loads)  # mostly the same in many conversations


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
            self._template = bounded(partial(sandbox().from_string, source))
        except Exception as error:  # of Jinja's, and all that Python's compiler says of what Jinja made
            detail = " ".join(str(error).split())[:200]
            raise UserError(f"{where}: is no chat template: {detail or type(error).__name__}; {REMEDY}") from error

    def run(
        self, messages: Sequence[Message], tools: Sequence[str], parts: Collection[str] = (), **variables: Any
    ) -> str:
        """Write a conversation; `TAG` marks where a `{% generation %}` begins or ends, `DATE` stands for a date.

        `tools`: JSON texts. `parts`: roles whose contents the template gets as lists; questions that have parts are
        lists too. Raises `Rejected`: unsupported_field if the template refuses the conversation, costly_template if it
        writes more than `MOST_WRITTEN` characters.
        """
        told = {
            "messages": [_as_openai(message, message.role in parts) for message in messages],
            "tools": [_tool(tool) for tool in tools] or None,
            "documents": None,
            "add_generation_prompt": False,
            "generation_tag": TAG,
        }
        try:
            text = self._template.render(**{**self.variables, **told, **variables})
        except (MemoryError, CostError):
            raise
        except Exception as error:  # another's program may raise anything
            detail = " ".join(str(error).split())[:200]
            raise Rejected("unsupported_field", f"refuses it: {detail}") from error
        if len(text) > MOST_WRITTEN:
            raise Rejected("costly_template", f"writes {len(text)} characters for it; the limit is {MOST_WRITTEN}")
        return text if text.startswith(self.first) else self.first + text


def _as_openai(message: Message, as_parts: bool) -> dict[str, Any]:
    """Convert a message to the mapping that `apply_chat_template` takes; its content is a list of parts if `as_parts`,
    or for a question that has parts, else text."""
    content: Any = message.words
    if content and (as_parts or (message.role == USER and message.parts)):
        kinds = KINDS if message.parts else {}
        parts = message.parts or (content,)
        content = [{"type": kinds[part]} if part in kinds else {"type": "text", "text": part} for part in parts]
    told = {"role": message.role, "content": content}
    if message.calls:
        told["tool_calls"] = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.calls
        ]
    if message.reasoning is not None:
        told["reasoning_content"] = message.reasoning
    return told
