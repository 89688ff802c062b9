"""Readers of a model's folder: chat templates, tokenizers, settings of processors, adapters, indexes; and recipes."""

import json
import shutil
from pathlib import Path
from typing import Any

from examples.demo.data import train_tokenizer
from megatron.vlm.data.templates import CHATS
from megatron.vlm.hf.peft_config import PeftConfig
from megatron.vlm.preprocessing.folder_files import folder_settings
from megatron.vlm.preprocessing.folder_template import folder_template, open_template
from megatron.vlm.preprocessing.model_recipe import model_settings
from megatron.vlm.preprocessing.tokenizer import SAMPLE, load_tokenizer
from omnibal_ext.architectures.folder import INDEX, weight_files
from omnibal_ext.architectures.huggingface import read_architecture
from omnibal_ext.launch.recipe import with_recipe
from tests.demo import byte_level
from tests.fuzz.mutate import Choices
from tests.fuzz.reader import Reader

PROGRAM = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ m.content }}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL = {"content": "<|im_end|>", "special": True}
CONFIG: dict[str, Any] = {
    "bos_token": "<s>", "eos_token": SPECIAL, "pad_token": "<pad>", "unk_token": None, "add_bos_token": None,
    "added_tokens_decoder": {"5": SPECIAL, "6": {"content": "<|im_start|>", "special": True}},
}  # fmt: skip
STEPS = {
    "type": "Sequence", "processors": [
        {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {}}]}
    ],
}  # fmt: skip


def folder_readers(folder: Path) -> dict[str, Reader]:
    """Those of a model's folder."""
    return {
        "template": _templates(), "template program": _programs(folder), "tokenizer.json": _tokenizer_json(),
        "tokenizer.model": _tokenizer_model(), "settings": _settings(folder / "settings"), "adapter": _adapter(),
        "weight index": _index(), "recipe": _recipe(),
    }  # fmt: skip


def _bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


def _templates() -> Reader:
    """In each of the files that may have one, which are read in this order."""
    several = [{"name": "default", "template": PROGRAM}, {"name": "tool_use", "template": PROGRAM}]
    files = {
        "chat_template.jinja": PROGRAM.encode(), "chat_template.json": _bytes({"chat_template": PROGRAM}),
        "tokenizer_config.json": _bytes({**CONFIG, "chat_template": several}),
        "tokenizer.json": _bytes({"added_tokens": [{"id": 5, **SPECIAL}], "post_processor": STEPS}),
    }  # fmt: skip
    return Reader(files, folder_template)


TERMS: tuple[str, ...] = (
    "messages", "messages[0].content", "messages[-1].role", "q", "tools", "bos_token", "ns.a", "2", "-1", "10**9",
    "'<|im_end|>'",
    "[1, 2]", "{'a': 3}", "none", "X + Y", "X ~ Y", "X * Y", "X ** Y", "X % Y", "X // Y", "X in Y", "X == Y", "X[Y]",
    "X[:Y]", "X.strip()", "X|length", "X|tojson", "X|int(base=Y)", "X|round(Y)", "X|center(Y)", "X|indent(Y)",
    "X|join(Y)", "X|list", "X|sort", "X|map(attribute='role')|list", "X|replace(Y, X)", "'%*d' % (Y, X)",
    "'{:>9}'.format(X)", "range(Y)|list", "X.__class__", "raise_exception(X)", "strftime_now(X)", "namespace(a=X)",
    "X if Y else X", "(X, Y)", "not X", "X.ljust(Y)", "X.format(Y)", "X is divisibleby(Y)", "f(X)", "cycler(X, Y)",
)  # fmt: skip
STATEMENTS: tuple[str, ...] = (
    "{{ X }}", "{% set ns.a = X %}", "{% set q = X %}", "{% for m in messages %}B{% endfor %}",
    "{% for i in range(X) %}B{% endfor %}", "{% if X %}B{% else %}B{% endif %}",
    "{% for i in X recursive %}B{% endfor %}",
    "{% macro f(m) %}B{% endmacro %}", "{% break %}", "{% generation %}B{% endgeneration %}", "{% raw %}B{% endraw %}",
    "{% filter upper %}B{% endfilter %}", "{% set ns = namespace(a=X) %}", "{% call f(X) %}B{% endcall %}", PROGRAM,
    "B B", "{%- X -%}",
)  # fmt: skip


def written(choices: Choices, forms: tuple[str, ...], depth: int) -> str:
    """A text of the grammar: X and Y are terms, B statements."""
    text = str(choices.one(forms))
    if not depth:
        return text if forms is STATEMENTS else "2"
    parts = []
    for letter in text:
        inner = {"X": TERMS, "Y": TERMS, "B": STATEMENTS}.get(letter)
        parts.append(written(choices, inner, depth - 1) if inner else letter)
    return "".join(parts)


def _programs(home: Path) -> Reader:
    home = home / "program"

    def read(folder: Path) -> None:
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        choices = Choices((folder / "choices").read_bytes())
        text = "{% set ns = namespace(a=[1]) %}" + written(choices, STATEMENTS, 1 + choices.below(3)) + PROGRAM
        (home / "chat_template.jinja").write_text(text)
        (home / "tokenizer_config.json").write_bytes(_bytes(CONFIG))
        template = open_template(str(home / "chat_template.jinja"), home / "tokenizer.model")
        for chat in CHATS:
            template.written(chat)

    return Reader({"choices": bytes(range(64))}, read)


def _use(path: Path) -> None:
    tokenizer = load_tokenizer(path, ("<|im_start|>", "<|im_end|>"))
    tokenizer.encode(SAMPLE)
    tokenizer.vocabulary_hash()


def _tokenizer_json() -> Reader:
    whole = json.loads(byte_level(["Read the digits. a7b0"] * 3, 262).to_str())
    normalizer = {"type": "Replace", "pattern": {"String": "q"}, "content": "Q"}
    files = {
        "tokenizer.json": _bytes({**whole, "normalizer": {"type": "Sequence", "normalizers": [normalizer]}}),
        "tokenizer_config.json": _bytes(CONFIG),
    }
    return Reader(files, lambda folder: _use(folder / "tokenizer.json"))


def _tokenizer_model() -> Reader:
    files = {"tokenizer.model": train_tokenizer(), "added_tokens.json": b'{"<b>": 900}',
             "tokenizer_config.json": _bytes(CONFIG)}  # fmt: skip
    return Reader(files, lambda folder: _use(folder / "tokenizer.model"))


def _settings(home: Path) -> Reader:
    """Of every family: the files of one whose file is damaged are read."""
    import transformers

    from tests.system.families import FAMILIES

    files: dict[str, bytes] = {}
    for name, family in FAMILIES.items():
        tokens = dict(zip(family.tokens, range(5, 100), strict=False))
        made = getattr(transformers, f"{family.name}Config")(
            vision_config=dict(family.vision), text_config=dict(family.text), **tokens, **family.more
        )
        files[f"{name}|config.json"] = made.to_json_string().encode()
        for file, fields in {**family.files, "preprocessor_config.json": family.processor}.items():
            files[f"{name}|{file}"] = _bytes(fields)

    def read(folder: Path) -> None:
        damaged = [name for name, whole in files.items() if (folder / name).read_bytes() != whole]
        family = (damaged or list(files))[0].partition("|")[0]
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        for name in files:
            if name.startswith(f"{family}|"):
                shutil.copyfile(folder / name, home / name.partition("|")[2])
        model = read_architecture(home)
        folder_settings(home, model, with_template=False)
        model_settings(model, home, with_template=False)

    return Reader(files, read)


def _adapter() -> Reader:
    config = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "use_rslora": False, "lora_dropout": 0.1, "bias": "none",
        "rank_pattern": {"a.b": 4}, "alpha_pattern": {"a.b": 8}, "target_modules": ["q_proj"],
        "init_lora_weights": True, "modules_to_save": None,
    }  # fmt: skip

    def read(folder: Path) -> None:
        found = PeftConfig.read(folder)
        _ = found.rank, found.alpha, found.dropout, found.notes
        found.check_layer("x.a.b", 4)

    return Reader({"adapter_config.json": _bytes(config)}, read)


def _index() -> Reader:
    index = {"metadata": {"total_size": 9}, "weight_map": {f"layer.{n}": f"{n % 2}.safetensors" for n in range(6)}}
    return Reader({INDEX: _bytes(index)}, weight_files)


def _recipe() -> Reader:
    recipe = {
        "flags": {"model": "tiny", "nproc-per-node": 2, "freeze": ["vit"], "bf16": True, "lr": 1e-3},
        "megatron": ["--adam-beta2", "0.95"],
    }
    return Reader({"r.json": _bytes(recipe)}, lambda folder: with_recipe(["--config", str(folder / "r.json")]))
