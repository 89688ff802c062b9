"""What is read of the files around a tokenizer, and the check of each: tokenizer_config.json, added_tokens.json,
tokenizer.json (besides what the library reads), chat templates."""

from pathlib import Path
from typing import Any

from omnibal_ext.architectures.folder import PROCESSOR
from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import (
    Check,
    anything,
    flag,
    integer,
    is_unicode,
    listing,
    mapping,
    maybe,
    record,
    shown,
    text,
)
from omnibal_ext.reading.document import read_json
from omnibal_ext.reading.files import read_bytes

JINJA, JSON, CONFIG, ADDED = "chat_template.jinja", "chat_template.json", "tokenizer_config.json", "added_tokens.json"
TOKENIZER = "tokenizer.json"
TEMPLATE_FILES = (PROCESSOR, JSON, JINJA, CONFIG)
"""Files in which a folder's chat template may be; of several, transformers' processors take the first."""
AGAIN = "download it again"
MOST_TEMPLATE = 2**20
"""Bytes of a chat template: published ones have up to 30,000."""
TOKEN_ID = integer(0, 2**24)


def token_text(token: Any) -> str:
    """Return a token's text; it is stored as text, or as an object with flags."""
    return str((token.get("content") if isinstance(token, dict) else token) or "")


def is_special(token: Any) -> bool:
    """Return whether a stored token is flagged as special."""
    return isinstance(token, dict) and bool(token.get("special"))


def _token(where: str, value: Any) -> Any:
    text(where, (value.get("content") if isinstance(value, dict) else value) or "")
    return value


def _decoder_of_ids(where: str, value: Any) -> dict[str, Any]:
    for number, token in mapping(anything)(where, value).items():
        TOKEN_ID(f"an id in {where}", int(number) if number.isdecimal() and len(number) < 20 else number)
        _token(f"{where}.{number}", token)
    return dict(value)


def _program(where: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > MOST_TEMPLATE or not is_unicode(value):
        raise UserError(f"{where} must be a text of up to {MOST_TEMPLATE} characters, got {shown(value)}")
    return value


_NAMED = listing(record({"name": text, "template": _program}), most=64)


def _template(where: str, value: Any) -> Any:
    return _NAMED(where, value) if isinstance(value, list) else maybe(_program)(where, value)


_TEMPLATE: dict[str, Check[Any]] = {"chat_template": _template}
_TOKENS = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), _token)
_STEP = record({}, {"single": listing(record({}, {"SpecialToken": record({"id": text})}))})


def _steps(where: str, value: Any) -> Any:
    return record({}, {"processors": listing(_STEP)})(where, _STEP(where, value))


CHECKS: dict[str, Check[Any]] = {
    JSON: record({}, _TEMPLATE),
    PROCESSOR: record({}, _TEMPLATE),
    CONFIG: record({}, {**_TEMPLATE, **_TOKENS, "added_tokens_decoder": _decoder_of_ids, "add_bos_token": maybe(flag)}),
    TOKENIZER: record({}, {"added_tokens": listing(_token), "post_processor": maybe(_steps)}),
    ADDED: mapping(TOKEN_ID),
}
"""File -> the check of its content."""


def read_neighbour(folder: Path, name: str) -> dict[str, Any]:
    """Read a file of `CHECKS` in a tokenizer's folder; {} if it is missing. Raises UserError naming file and field."""
    return read_json(folder / name, CHECKS[name], AGAIN) if (folder / name).exists() else {}


def template_source(file: Path) -> str:
    """Return the chat template in a .jinja or .json file, "" if it or the file is missing. Raises UserError."""
    if not file.is_file():
        return ""
    if file.suffix == ".jinja":
        try:
            return read_bytes(file, AGAIN, MOST_TEMPLATE).decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file}: is no text in UTF-8 ({error.reason} at byte {error.start}); {AGAIN}") from None
    template = read_json(file, CHECKS.get(file.name, CHECKS[JSON]), AGAIN).get("chat_template") or ""
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default", "")
    return str(template)
