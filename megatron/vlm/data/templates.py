"""Chat templates: from a conversation to one text, and the character ranges of it that are trained.

A template is data. Every turn is `opening + words + end + gap`; of the assistant's turns the words and the end are
trained, of other turns nothing:

    <s><|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                              ^^^^^^^^^^^^^^^ trained

The texts equal those of the models' Hugging Face chat templates (`apply_chat_template`), token for token in the tests.
Tools and reasoning become words of these turns (`turns.py`), where the model supports them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron.vlm.data.tool_forms import (
    GLM_REASONING,
    HERMES,
    PARAMETERS,
    PRINTED_PARAMETERS,
    QWEN3_5_REASONING,
    QWEN3_REASONING,
    ReasoningForm,
    ToolForm,
)
from megatron.vlm.data.turns import ASSISTANT, SYSTEM, USER, Message, flatten_turns
from omnibal_ext.errors import UserError
from omnibal_ext.families.markup import MARKS, ImageMarkup, Places


@dataclass(frozen=True, slots=True)
class Turn:
    """How one role's words are wrapped: `opening + words + end + gap`."""

    opening: str
    end: str
    gap: str = ""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat format. `tokens` are its special tokens; a role without a `Turn` is not supported by the model."""

    name: str
    beginning: str
    turns: dict[str, Turn]
    tokens: tuple[str, ...]
    strips_words: bool = False
    part_end: str = ""  # after each text of a system message that is a list of texts
    system: str | None = None  # the default system message
    closed_by_user: bool = False  # an answer ends with the opening of a user's turn, the last one too
    system_varies: bool = False  # the Jinja template adds a variable system message (a date), which is left out
    closes_up: bool = False  # no space between a turn's opening and an image that begins it
    pair: bool = False  # one question with images and its answer; `beginning` comes after the last image
    system_opens: bool = False  # the system message begins the first user turn, unstripped
    tools: ToolForm | None = None  # how tools, calls and results are written; None: not supported
    reasoning: ReasoningForm | None = None  # how reasoning is written; None: not supported

    @property
    def end_of_turn(self) -> str:
        """The token at which a reply stops."""
        return self.turns[ASSISTANT].end


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text of a conversation and its trained half-open character ranges, in order.

    The text is tokenised separately before and after each of `cuts`.
    """

    text: str
    trained: tuple[tuple[int, int], ...]
    cuts: tuple[int, ...] = ()


def _chatml(name: str, beginning: str = "", system: str | None = None) -> ChatTemplate:
    turns = {role: Turn(f"<|im_start|>{role}\n", end="<|im_end|>", gap="\n") for role in (SYSTEM, USER, ASSISTANT)}
    tokens = ("<|im_start|>", "<|im_end|>")
    return ChatTemplate(name, beginning, turns, (beginning, *tokens) if beginning else tokens, system=system)


def _llama3(name: str, system: str | None = None) -> ChatTemplate:
    turns = {
        role: Turn(f"<|start_header_id|>{role}<|end_header_id|>\n\n", end="<|eot_id|>")
        for role in (SYSTEM, USER, ASSISTANT)
    }
    tokens = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    return ChatTemplate(name, tokens[0], turns, tokens, strips_words=True, system=system)


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


def _mistral() -> ChatTemplate:
    """Mistral-Instruct 0.2's, as in LLaVA-1.6; without a system message."""
    turns = {USER: Turn("[INST] ", end=" [/INST]"), ASSISTANT: Turn(" ", end="</s>")}
    return ChatTemplate("mistral", "<s>", turns, ("<s>", "</s>"))


def _mistral_v7() -> ChatTemplate:
    """Mistral Small 3's. Its Jinja template adds a system message with today's date if there is none."""
    turns = {
        SYSTEM: Turn("[SYSTEM_PROMPT]", end="[/SYSTEM_PROMPT]"),
        USER: Turn("[INST]", end="[/INST]"),
        ASSISTANT: Turn("", end="</s>"),
    }
    words = ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
    return ChatTemplate("mistral-v7", "<s>", turns, words, system_varies=True)


def _glm(name: str, reasoning: ReasoningForm | None = None) -> ChatTemplate:
    """GLM-4.1V's and GLM-4.5V's: an answer ends where the user's turn begins."""
    turns = {role: Turn(f"<|{role}|>\n", end="") for role in (SYSTEM, USER, ASSISTANT)}
    turns[ASSISTANT] = replace(turns[ASSISTANT], end="<|user|>")
    words = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")
    return ChatTemplate(name, "[gMASK]<sop>", turns, words, closed_by_user=True, reasoning=reasoning)


def _idefics3(name: str, beginning: str) -> ChatTemplate:
    """Idefics 3's and SmolVLM's, which differ in the beginning."""
    turns = {role: Turn(f"{role.capitalize()}: ", "<end_of_utterance>", "\n") for role in (SYSTEM, USER, ASSISTANT)}
    return ChatTemplate(name, beginning, turns, (beginning, "<end_of_utterance>"), closes_up=True)


def _gemma() -> ChatTemplate:
    names = {SYSTEM: "user", USER: "user", ASSISTANT: "model"}
    turns = {role: Turn(f"<start_of_turn>{name}\n", end="<end_of_turn>", gap="\n") for role, name in names.items()}
    turns[SYSTEM] = replace(turns[SYSTEM], end="", gap="\n\n")
    tokens = ("<bos>", "<start_of_turn>", "<end_of_turn>")
    return ChatTemplate("gemma", tokens[0], turns, tokens, strips_words=True, system_opens=True)


def _gemma4() -> ChatTemplate:
    names = {SYSTEM: "system", USER: "user", ASSISTANT: "model"}
    turns = {role: Turn(f"<|turn>{name}\n", end="<turn|>", gap="\n") for role, name in names.items()}
    tokens = ("<bos>", "<|turn>", "<turn|>")
    return ChatTemplate("gemma4", tokens[0], turns, tokens, strips_words=True, part_end=" ")


def _paligemma() -> ChatTemplate:
    """What PaliGemma's processor makes of a prompt and a suffix; it has no chat template."""
    turns = {USER: Turn("", end="\n"), ASSISTANT: Turn("", end="<eos>")}
    return ChatTemplate("paligemma", "<bos>", turns, ("<bos>", "<eos>"), pair=True)


LLAVA_V1_SYSTEM = (
    "A chat between a curious human and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the human's questions."
)
LLAVA_LLAMA3_SYSTEM = (
    "You are a helpful language and vision assistant. You are able to understand the visual content that the user "
    "provides, and assist the user with a variety of tasks using natural language."
)
TEMPLATES = {
    template.name: template
    for template in (
        _chatml("internlm2-chat", beginning="<s>"),
        _chatml("hermes-2"),
        _chatml("chatml"),
        _chatml("qwen-vl", system="You are a helpful assistant."),
        replace(_chatml("qwen2.5-vl", system="You are a helpful assistant."), tools=replace(HERMES, pictures=False)),
        replace(_chatml("qwen3-vl"), tools=HERMES),
        replace(_chatml("qwen3-vl-thinking"), tools=HERMES, reasoning=QWEN3_REASONING),
        replace(_chatml("qwen3.5"), tools=PRINTED_PARAMETERS, reasoning=QWEN3_5_REASONING, strips_words=True),
        replace(_chatml("qwen3.6"), tools=PARAMETERS, reasoning=QWEN3_5_REASONING, strips_words=True),
        _chatml("hermes-2-llama3", beginning="<|begin_of_text|>"),
        _llama3("llama3"),
        _llama3("llava-llama3", LLAVA_LLAMA3_SYSTEM),
        _mistral(),
        _mistral_v7(),
        _glm("glm-4.1v"),
        _glm("glm-4.5v", GLM_REASONING),
        _vicuna(),
        replace(_vicuna(), name="llava-v1", system=LLAVA_V1_SYSTEM),
        _gemma(),
        _gemma4(),
        _idefics3("idefics3", "<|begin_of_text|>"),
        _idefics3("smolvlm", "<|im_start|>"),
        _paligemma(),
    )
}


def chat_template(name: str) -> ChatTemplate:
    """The template of that name. Raises `UserError` naming the known ones."""
    if name not in TEMPLATES:
        raise UserError(f"unknown chat template {name!r}; known: {', '.join(TEMPLATES)}")
    return TEMPLATES[name]


def render_chat(
    messages: Sequence[Message],
    template: ChatTemplate,
    markup: ImageMarkup,
    shown: Iterable[Places | Sequence[float]] = (),
    tools: Sequence[str] = (),
) -> RenderedChat:
    """Render a conversation by `template`, with image and video marks replaced by `markup`.

    `shown`: for every mark in order, an image's `Places` or the seconds of a video's steps; default: one place each.
    `tools`: JSON texts, if the template supports tools.
    """
    beginning = "" if template.pair else template.beginning
    pieces, trained, length, opened, closed = [beginning], [], len(beginning), False, False
    left = iter(shown)
    stripped = [_begun(_stripped(message, template), template) for message in messages]
    for message in flatten_turns(stripped, tools, template.tools, template.reasoning):
        turn = template.turns[message.role]
        if opened:
            turn = replace(turn, opening="")
        elif closed and template.closed_by_user:
            turn = replace(turn, opening=turn.opening.removeprefix(template.end_of_turn))
        if template.closes_up and MARKS.match(message.words):
            turn = replace(turn, opening=turn.opening.rstrip())
        opened, closed = template.system_opens and message.role == SYSTEM, message.role == ASSISTANT
        words = MARKS.sub(lambda mark: _as_words(markup, next(left, Places())), message.words)
        if message.role == ASSISTANT and message.trained:
            start = length + len(turn.opening)
            trained.append((start, start + len(words) + len(turn.end)))
        pieces.append(turn.opening + words + turn.end + turn.gap)
        length += len(pieces[-1])
    cuts = tuple(start for start, _ in trained) if template.pair else ()
    return RenderedChat("".join(pieces), tuple(trained), cuts)


def _as_words(markup: ImageMarkup, shown: Places | Sequence[float]) -> str:
    return markup.image_text(shown) if isinstance(shown, Places) else markup.video_text(shown)


def _stripped(message: Message, template: ChatTemplate) -> Message:
    if message.parts and template.part_end:
        return replace(message, words="".join(part.strip() + template.part_end for part in message.parts))
    as_it_is = template.system_opens and message.role == SYSTEM
    return replace(message, words=message.words.strip()) if template.strips_words and not as_it_is else message


def _begun(message: Message, template: ChatTemplate) -> Message:
    """Insert `beginning` after a pair's last image."""
    if not template.pair or message.role != USER:
        return message
    end = max((mark.end() for mark in MARKS.finditer(message.words)), default=0)
    return replace(message, words=message.words[:end] + template.beginning + message.words[end:])
