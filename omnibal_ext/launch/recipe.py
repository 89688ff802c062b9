"""`--config FILE`: the flags of a run in a JSON file, a recipe; a run's inputs.json is one.

{"flags": {"model": "Qwen3-VL-8B-Instruct", "nproc-per-node": 8, "freeze": ["vit"], "bf16": true},
 "megatron": ["--adam-beta2", "0.95"]}
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.reading.checks import anything, listing, mapping, record, shown, text
from omnibal_ext.reading.document import if_sealed, read_json
from omnibal_ext.reading.stores import SCHEME

FLAG = "--config"
RECIPE = if_sealed(record({"flags": mapping(anything)}, {"megatron": listing(text)}))
REMEDY = 'give a JSON object {"flags": {"model": ..., "llm-budget": ...}}, or inputs.json of a run'
OF_THE_RUN = ("run-dir", "config", "dry-run", "check", "fresh", "json", "progress")
"""Flags that are not part of a recipe: where a run is, and how it is started."""
BY_HAND = frozenset((
    *("trust", "download", "rdzv-endpoint", "stores"),
    *("save", "metrics-file", "tensorboard-dir", "wandb-save-dir", "memory-snapshot-path", "flight-recorder-dump-path"),
    "cache-tiles",
    *("wandb-project", "wandb-exp-name", "wandb-entity", "log-straggler", "straggler-ctrlr-port"),
))  # fmt: skip
"""Flags that only who starts a run may give, as a recipe may be a stranger's: what lets code run (as torch's rendezvous
does for its host), or is fetched; what names a place to write; what sends to others or listens. No run notes them."""
SHIPPED = tuple(Path(__file__).parents[2] / folder for folder in ("examples/recipes", "omnibal_tools/recipes"))
"""Where the project's recipes are: in a checkout, and next to what is installed."""
NAME = re.compile(r"[a-z0-9][a-z0-9-]*")


def with_recipe(words: Sequence[str]) -> list[str]:
    """A command line with the flags of its `--config FILE` in front; flags that it gives itself are left out of these.

    Raises:
        UserError: the file cannot be read, or has a value that is no text, number, list of them or `true`, or a flag
            of `BY_HAND` that the command line does not give itself.
    """
    ours, megatron = _halves(words)
    given = _values(ours)
    if "config" not in given:
        return [*words]
    path = given["config"]
    if not isinstance(path, str):
        raise UserError(f"{FLAG} takes one file; {REMEDY}")
    path = str(_found(path))
    recipe = read_json(path, RECIPE, REMEDY)
    noted = recipe.get("megatron", ())
    _refuse_by_hand(path, {*recipe["flags"], *_values(noted)} - {*given, *_values(megatron)})
    found = [
        word
        for name, value in recipe["flags"].items()
        if name not in given and name not in OF_THE_RUN and name not in BY_HAND
        for word in (f"--{name}", *_written(path, name, value))
    ]
    own = [word for name, value in given.items() if name != "config" for word in (f"--{name}", *_as_words(value))]
    further = [*_without_by_hand(noted), *megatron]
    return [*found, *own, *(["--", *further] if further else [])]


def _found(name: str) -> Path:
    """The file of that name, else the recipe of that name that comes with the project."""
    own, file = Path(name), f"{name.removesuffix('.json')}.json"
    found = [own] if own.name != name else [own, *(folder / file for folder in SHIPPED)]
    return next((path for path in found if path.exists()), own)


def recipe_of(words: Sequence[str]) -> dict[str, Any]:
    """The record of a command line that `with_recipe` reads, without `OF_THE_RUN` and `BY_HAND`."""
    ours, further = _halves(words)
    flags = {name: value for name, value in _values(ours).items() if name not in OF_THE_RUN and name not in BY_HAND}
    megatron = _without_by_hand(further)
    return {"flags": flags} | ({"megatron": megatron} if megatron else {})


def _refuse_by_hand(path: str, names: set[str]) -> None:
    """Raise UserError for flags of a recipe that only a command line may give."""
    if found := ", ".join(f"--{name}" for name in sorted(names & BY_HAND)):
        raise UserError(
            f"{path}: has {found}, which no file may give, as it may let others in or say where to write: take it out "
            "there, or give it on the command line too"
        )


def _without_by_hand(words: Sequence[str]) -> list[str]:
    """Words of flags and their values without those of `BY_HAND`."""
    kept, keeps = [], True
    for word in words:
        if word.startswith("--"):
            keeps = word[2:].partition("=")[0] not in BY_HAND
        kept += [word] if keeps else []
    return kept


def _halves(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before and after --."""
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end]], [*words[end + 1 :]]


def _values(words: Sequence[str]) -> dict[str, Any]:
    """{flag without dashes: true, its value, or a list of several}."""
    values: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values[name] = [value] if equals else []
        else:
            values.setdefault(name, []).append(word)
    return {name: True if not each else each[0] if len(each) == 1 else each for name, each in values.items()}


def _as_words(value: Any) -> list[str]:
    if value is True:
        return []
    return [str(each) for each in (value if isinstance(value, list) else [value])]


def _written(path: str, name: str, value: Any) -> list[str]:
    """The words of a flag's value; neither it nor the name may pass for further flags."""
    parts = value if isinstance(value, list) else [value]
    if not NAME.fullmatch(name) or any(str(part).startswith("--") for part in parts):
        raise UserError(f"{path}: flags.{shown(name)}: {shown(value)}: one flag each, without its dashes; {REMEDY}")
    if name in ("input", "image-root") and any(SCHEME.match(str(part)) for part in parts):
        raise UserError(f"{path}: flags.{name} names a store, which no file may: give --{name} on the command line too")
    if value is not True and not (parts and all(type(part) in (str, int, float) for part in parts)):
        raise UserError(f"{path}: flags.{name} must be text, a number, a list of them or true, found {shown(value)}")
    return _as_words(value)
