"""Chat templates: a conversation becomes one text, and we know which characters of it the model is to predict.

A template is data. Every turn is `opening + words + end of turn + gap`; of the assistant's turns the words and the end
of turn are trained, of all other turns nothing:

    <s><|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                              ^^^^^^^^^^^^^^^ trained

The texts are those of the models' own Hugging Face chat templates (`apply_chat_template`), to which the tests compare
them token for token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from omnibal_ext.errors import UserError

IMAGE_MARK = "<image>"  # in the user's data
IMAGE_START, IMAGE_CONTEXT, IMAGE_END = "<img>", "<IMG_CONTEXT>", "</img>"  # in the text that the model reads
IMAGE_TEXT = IMAGE_START + IMAGE_CONTEXT + IMAGE_END  # the context token is repeated later, once the tiles are counted

# The nine tokens that InternVL adds to a language model, in its order, so that vocabularies agree with its checkpoints.
IMAGE_TOKENS = (IMAGE_START, IMAGE_END, IMAGE_CONTEXT, "<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>")

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: who speaks (`SYSTEM`, `USER`, `ASSISTANT`) and the words, with `<image>` marks still in them."""

    role: str
    words: str


@dataclass(frozen=True, slots=True)
class Turn:
    """How one role's words are wrapped: `opening + words + end + gap`."""

    opening: str
    end: str
    gap: str = ""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat format. `tokens` are the special tokens it relies on; `end_of_turn` closes the assistant's words."""

    name: str
    beginning: str
    turns: dict[str, Turn]
    tokens: tuple[str, ...]
    strips_words: bool = False
    system: str | None = None  # what the model was trained with, for conversations that bring no system turn

    @property
    def end_of_turn(self) -> str:
        """The token at which a reply stops."""
        return self.turns[ASSISTANT].end

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """All tokens that a tokenizer must know as one id each, ours for images included."""
        return (*self.tokens, *IMAGE_TOKENS)

    @property
    def reserved(self) -> tuple[str, ...]:
        """What nobody's words may contain: it would be read as structure."""
        return (*self.tokens, IMAGE_START, IMAGE_CONTEXT, IMAGE_END)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text of a conversation and the half-open character ranges of it that are trained, in order."""

    text: str
    trained: tuple[tuple[int, int], ...]


def _chatml(name: str, beginning: str = "") -> ChatTemplate:
    turns = {role: Turn(f"<|im_start|>{role}\n", end="<|im_end|>", gap="\n") for role in (SYSTEM, USER, ASSISTANT)}
    tokens = ("<|im_start|>", "<|im_end|>")
    return ChatTemplate(name, beginning, turns, (beginning, *tokens) if beginning else tokens)


def _llama3() -> ChatTemplate:
    turns = {
        role: Turn(f"<|start_header_id|>{role}<|end_header_id|>\n\n", end="<|eot_id|>")
        for role in (SYSTEM, USER, ASSISTANT)
    }
    tokens = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    return ChatTemplate("llama3", tokens[0], turns, tokens, strips_words=True)


def _vicuna() -> ChatTemplate:
    turns = {
        SYSTEM: Turn("", end="", gap=" "),
        USER: Turn("USER: ", end="", gap=" "),
        ASSISTANT: Turn("ASSISTANT: ", end="</s>"),
    }
    system = (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions."
    )
    return ChatTemplate("vicuna", "<s>", turns, ("<s>", "</s>"), system=system)


TEMPLATES = {
    template.name: template
    for template in (
        _chatml("internlm2-chat", beginning="<s>"),
        _chatml("hermes-2"),
        _chatml("chatml"),
        _llama3(),
        _vicuna(),
    )
}


def chat_template(name: str) -> ChatTemplate:
    """The template of that name; `UserError` naming the known ones if there is none."""
    if name not in TEMPLATES:
        raise UserError(f"unknown chat template {name!r}; known: {', '.join(TEMPLATES)}")
    return TEMPLATES[name]


def render_chat(messages: Sequence[Message], template: ChatTemplate) -> RenderedChat:
    """Write a conversation down as `template` has it, every `<image>` mark as `IMAGE_TEXT`."""
    pieces, trained, length = [template.beginning], [], len(template.beginning)
    for message in messages:
        turn = template.turns[message.role]
        words = message.words.strip() if template.strips_words else message.words
        words = words.replace(IMAGE_MARK, IMAGE_TEXT)
        if message.role == ASSISTANT:
            start = length + len(turn.opening)
            trained.append((start, start + len(words) + len(turn.end)))
        pieces.append(turn.opening + words + turn.end + turn.gap)
        length += len(pieces[-1])
    return RenderedChat("".join(pieces), tuple(trained))
