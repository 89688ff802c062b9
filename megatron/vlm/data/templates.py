"""Chat templates: a conversation becomes one text, and we know which characters of it the model is to predict.

A template is data. Every turn is `opening + words + end of turn + gap`; of the assistant's turns the words and the end
of turn are trained, of all other turns nothing:

    <s><|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
                                                              ^^^^^^^^^^^^^^^ trained

The texts are those of the models' own Hugging Face chat templates (`apply_chat_template`), to which the tests compare
them token for token. Tools and reasoning are words of these turns (`turns.py`), where the model knows them.
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
    """A chat format. `tokens` are the special tokens it relies on; `end_of_turn` closes the assistant's words.

    A role without a `Turn` is one that the model never saw.
    """

    name: str
    beginning: str
    turns: dict[str, Turn]
    tokens: tuple[str, ...]
    strips_words: bool = False
    part_end: str = ""  # stands behind each part of a system message that is given in parts
    system: str | None = None  # what the model was trained with, for conversations that bring no system turn
    closed_by_user: bool = False  # an answer ends with the mark of a user's turn, the last one too; no program has that
    system_varies: bool = False  # a folder's program may bring a system message of its own, which is left out
    closes_up: bool = False  # an image that begins a turn follows its opening without the space
    pair: bool = False  # one question with images and its answer: the text begins behind the last image
    system_opens: bool = False  # the system's words stand, as they are, at the head of the first user's turn
    tools: ToolForm | None = None  # how tools, calls and results are written; None: the model never saw any
    reasoning: ReasoningForm | None = None  # how reasoning is written; None: the model never saw any

    @property
    def end_of_turn(self) -> str:
        """The token at which a reply stops."""
        return self.turns[ASSISTANT].end


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text of a conversation and the half-open character ranges of it that are trained, in order.

    Its parts between `cuts` become tokens by themselves.
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
    """Mistral-Instruct 0.2's, as LLaVA-1.6 has it. Neither has a place for a system message."""
    turns = {USER: Turn("[INST] ", end=" [/INST]"), ASSISTANT: Turn(" ", end="</s>")}
    return ChatTemplate("mistral", "<s>", turns, ("<s>", "</s>"))


def _mistral_v7() -> ChatTemplate:
    """Mistral Small 3's. Its program puts a message with today's date before conversations that bring none."""
    turns = {
        SYSTEM: Turn("[SYSTEM_PROMPT]", end="[/SYSTEM_PROMPT]"),
        USER: Turn("[INST]", end="[/INST]"),
        ASSISTANT: Turn("", end="</s>"),
    }
    words = ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
    return ChatTemplate("mistral-v7", "<s>", turns, words, system_varies=True)


def _glm(name: str, reasoning: ReasoningForm | None = None) -> ChatTemplate:
    """GLM-4.1V's and GLM-4.5V's: generation stops where the user would speak, or at the end of the text."""
    turns = {role: Turn(f"<|{role}|>\n", end="") for role in (SYSTEM, USER, ASSISTANT)}
    turns[ASSISTANT] = replace(turns[ASSISTANT], end="<|user|>")
    words = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>")
    return ChatTemplate(name, "[gMASK]<sop>", turns, words, closed_by_user=True, reasoning=reasoning)


def _idefics3(name: str, beginning: str) -> ChatTemplate:
    """Idefics 3's and SmolVLM's, which begin otherwise."""
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
    """No program's: what its processor makes of a prompt and a suffix."""
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
    """The template of that name; `UserError` naming the known ones if there is none."""
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
    """Write a conversation down as `template` has it, every mark as `markup` has it.

    `shown` is, in the order of the marks, at which places an image stands, or the seconds of a video's steps;
    without it each stands at one place. `tools` are JSON texts, for a template that has a form for them.
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
    """The question of a pair, with the beginning of the text behind its last image."""
    if not template.pair or message.role != USER:
        return message
    end = max((mark.end() for mark in MARKS.finditer(message.words)), default=0)
    return replace(message, words=message.words[:end] + template.beginning + message.words[end:])
