"""Published chat templates against transformers: random conversations give the same text, of which the same is trained.

python -m tests.endurance.templates FILE.jinja... [--count 250] [--seed 0]

Each program is read as a folder's own is, and its conversations (system messages, tools, calls, reasoning, pictures in
any place) are written by ours and by transformers' `render_jinja_template`. What is trained is, where the program has
`{% generation %}` tags, what they enclose, and otherwise what stands behind the prompt that it writes for that answer;
both up to the token that ends an answer. A conversation may be refused in a line.
"""

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from megatron.vlm.data.formats.kinds import IMAGES
from megatron.vlm.data.templates import ChatTemplate, render_chat
from megatron.vlm.data.turns import ASSISTANT
from megatron.vlm.preprocessing.chat import parse_conversation
from megatron.vlm.preprocessing.record_media import SIGHT
from megatron.vlm.preprocessing.tool_turns import check_forms
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.families.markup import IMAGE_MARK
from omnibal_ext.families.registry import MARKUPS
from tests.unit.preprocessing.test_tool_turns import drawn

SPECIAL = re.compile(r"<\|[^|<>\s]+\|?>|</?s>|<(?:bos|eos|[a-z]+_of_[a-z]+)>|\[/?[A-Z_]+\]|<\uff5c[^\uff5c]+\uff5c>")
ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>")


def opened(file: Path) -> tuple[ChatTemplate, dict[str, str]]:
    """A file's program with tokens that are in it, and what it knows besides the conversation."""
    source = file.read_text(encoding="utf-8")
    special = set(SPECIAL.findall(source)) | {"<s>", "</s>"}
    known = {"bos_token": "<s>", "eos_token": next((end for end in ENDS if end in special), "</s>"), "pad_token": ""}
    return ChatTemplate(str(file), source, sorted(special), variables=known), known


def conversation(seed: int, template: ChatTemplate, pictures: bool) -> dict[str, Any]:
    """A random record with what the template has a form for."""
    draw, record = random.Random(seed), drawn(seed, template.has_reasoning, False)
    messages = record["messages"]
    if not template.has_tools:
        record.pop("tools", None)
        messages = [one for one in messages if not one.get("tool_calls") and one["role"] != "tool"]
    messages = [
        {**one, "content": one["content"] or ""} for one in messages if one["role"] != "system" or template.has_system
    ]
    for one in messages:
        if pictures and one["role"] == "user":
            texts = [one["content"], *draw.sample(["And? ", " so", "\n"], draw.randint(0, 2))]
            parts: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
            for _ in range(draw.randint(0, 2)):
                parts.insert(draw.randint(0, len(parts)), {"type": "image", "image": "a.png"})
            one["content"] = parts
    return {**record, "messages": messages}


def theirs(
    source: str, record: dict[str, Any], known: dict[str, str], upto: int | None = None, **more: Any
) -> list[tuple[str, list[Any]]]:
    """What transformers writes of a record, given as texts and as lists, and the ranges within tags."""
    found = []
    for lists in (False, True):
        messages = json.loads(json.dumps(record["messages"][:upto]))
        for one in messages:
            if isinstance(one["content"], str) and lists and one["content"]:
                one["content"] = [{"type": "text", "text": one["content"]}]
            if isinstance(one["content"], list):
                one["content"] = [{"type": "image"} if part["type"] == "image" else part for part in one["content"]]
        try:
            texts, marked = render_jinja_template(
                [messages], tools=record.get("tools"), chat_template=source, return_assistant_tokens_mask=True,
                **{"add_generation_prompt": False, **more}, **known,
            )  # fmt: skip
        except Exception:  # another's program may raise anything
            continue
        found.append((texts[0], marked[0]))
    return found


def image_text(source: str, known: dict[str, str]) -> str:
    """What a program writes for an image."""
    said = {"type": "text", "text": "One"}
    answer = {"role": ASSISTANT, "content": "Two"}
    without, shown = (
        theirs(source, {"messages": [{"role": "user", "content": parts}, answer]}, known)[-1][0]
        for parts in ([said], [said, {"type": "image"}])
    )
    size = len(shown) - len(without)
    places = [at for at in range(len(without) + 1) if shown[:at] + shown[at + size :] == without]
    return min((shown[at : at + size].strip() for at in places), key=lambda text: text[0] not in "<[")


def parted(ours: str, theirs: str) -> tuple[str, str]:
    """From a little before the first character in which two texts differ."""
    at = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return ours[max(at - 60, 0) : at + 60], theirs[max(at - 60, 0) : at + 60]


def compared(template: ChatTemplate, source: str, known: dict[str, str], record: dict[str, Any]) -> str:
    """Equal, refused for a reason, or what differs."""
    read = parse_conversation(json.dumps(record).encode(), (), "", SIGHT, bool(template.images_first))
    try:
        check_forms(read.messages, read.tools, template)
        chat = render_chat(read.messages, template, MARKUPS["paligemma"], (), read.tools)
    except Rejected as verdict:
        return f"refused: {verdict}" if theirs(source, record, known) else "refused by both"
    written = theirs(source, record, known)
    if read.media[IMAGES]:
        image = image_text(source, known)
        written = [(text.replace(image, IMAGE_MARK), []) for text, _ in written]
    ends = ("", template.ending)
    same = [(text, ranges) for text, ranges in written if any(chat.text == text + end for end in ends)]
    if not same:
        return f"text: {[parted(chat.text, text) for text, _ in written]!r}"
    return (
        "equal" if read.media[IMAGES] else trained(template, source, known, record, chat.text, chat.trained, same[0][1])
    )


def trained(
    template: ChatTemplate, source: str, known: dict[str, str], record: dict[str, Any], text: str,
    ours: Sequence[tuple[int, int]], tagged: Sequence[tuple[int, int]],
) -> str:  # fmt: skip
    """Whether what is trained is the same, by tags or by prompts."""
    if tagged:
        wanted = [(start, end) for start, end in tagged if end > start]
        alike = len(wanted) == len(ours) and all(
            start == s and text[end:e].strip() in ("", template.ending) and e >= end
            for (start, end), (s, e) in zip(wanted, ours, strict=True)
        )
        return "equal" if alike else f"tags: {text!r} {[text[a:b] for a, b in ours]} {[text[a:b] for a, b in wanted]}"
    left = list(ours)
    for number, one in enumerate(record["messages"]):
        if one["role"] != ASSISTANT or not left:
            continue
        prompts = [
            p for p, _ in theirs(source, record, known, number, add_generation_prompt=True) if text.startswith(p)
        ]
        start, end = left.pop(0)
        said = (one["content"] or "").strip()
        if prompts and start not in map(len, prompts) and text[len(prompts[0]) : start].strip():
            return f"prompt: {text!r}: {text[start:end]!r} behind {prompts[0]!r}"
        words = said.split("</think>")[-1].strip()
        if words and text.count(words) and words not in text[start:end] and not one.get("tool_calls"):
            return f"words: {text!r}: {text[start:end]!r} without {said!r}"
    return "equal"


def main() -> None:
    """Print for each file what came of its conversations, and the first that differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=250)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    all_of = Counter[str]()
    for file in args.files:
        try:
            template, known = opened(file)
            template.check()
        except UserError as error:
            all_of["programs refused"] += 1
            print(f"{file.name}: refused: {str(error)[-150:]}")
            continue
        seen, first = Counter[str](), ""
        for seed in range(args.seed, args.seed + args.count):
            record = conversation(seed, template, template.images_first is not None and seed % 2 == 1)
            verdict = compared(template, file.read_text(encoding="utf-8"), known, record)
            kind = verdict.partition(":")[0]
            first = first or (verdict if ":" in verdict else "")
            seen[kind] += 1
        all_of += seen
        all_of["programs"] += 1
        print(f"{file.name}: {dict(seen)} {first[:1500]}", flush=True)
    print(dict(all_of))


if __name__ == "__main__":
    main()
