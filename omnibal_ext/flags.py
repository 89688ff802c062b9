"""Checks of command lines: tables of the numbers that flags take, and of what else a flag requires."""

import argparse
import difflib
import math
import re
import sys
import unicodedata
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, ClassVar, NoReturn

from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import FURTHER
from omnibal_ext.reading.stores import SCHEMES

INTERVAL = re.compile(r"([\[(])(\S+), (\S+)([])])")


@dataclass(frozen=True)
class Interval:
    """The numbers that some flags take, an interval in mathematical notation: "[0, 1)" is 0 <= x < 1.

    `names` are the flags' attribute names, separated by white space. NaN is in no interval.
    """

    interval: str
    names: str

    @property
    def ends(self) -> tuple[str, str, str, str]:
        """(left bracket, least, most, right bracket), each as it is written."""
        parts = INTERVAL.fullmatch(self.interval)
        assert parts, self.interval
        return parts[1], parts[2], parts[3], parts[4]

    def holds(self, value: float) -> bool:
        """Say whether a number lies in the interval."""
        left, least, most, right = self.ends
        above = value >= float(least) if left == "[" else value > float(least)
        return above and (value <= float(most) if right == "]" else value < float(most))

    @property
    def wanted(self) -> str:
        """The interval in words, for messages: "at least 0 and below 1"."""
        left, least, most, right = self.ends
        low = f"{'at least' if left == '[' else 'above'} {least}"
        high = f"{'at most' if right == ']' else 'below'} {most}"
        return low if most == "inf" else f"{low} and {high}"


@dataclass(frozen=True)
class Need:
    """Flags (attribute names) that would do nothing, or break the run, unless a condition holds.

    `needs` states the condition and the remedy for the message; `holds` tests the values of all flags, also defaults.
    """

    names: str
    needs: str
    holds: Callable[[Namespace], bool]


class _Forwarded(argparse.Action):
    """A flag that is stored like any other and also appended to the words after --, for the program that gets these."""

    def __init__(self, of: argparse.Action) -> None:
        self.const_value = of.const
        taken = {name: getattr(of, name) for name in ("option_strings", "dest", "type", "choices", "metavar", "help")}
        super().__init__(nargs=of.nargs, **taken)

    def __call__(self, parser: Any, namespace: Namespace, values: Any, option_string: str | None = None) -> None:
        words = getattr(namespace, parser.forwards_to)
        if twice := set(self.option_strings) & {word.partition("=")[0] for word in words}:
            raise UserError(f"{twice.pop()} is given twice (on both sides of --, or before it); give it once")
        valued = values if isinstance(values, list) else [values]
        words += [option_string, *map(str, valued)]
        setattr(namespace, self.dest, self.const_value if self.nargs == 0 else values)


class ToolParser(ArgumentParser):
    """The parser of a tool's command line; errors are a `UserError`.

    `numbers`: the interval of every flag that takes numbers; `needs`: conditions of flags; `forwards_to`: the program
    that gets the words after --, and the name of the attribute that holds them.
    """

    program: ClassVar[str | None] = None
    """The program's name in messages; None: its file name."""

    def __init__(
        self, *, numbers: Sequence[Interval] = (), needs: Sequence[Need] = (), forwards_to: str = "", **named: Any
    ) -> None:
        super().__init__(**{"prog": self.program, **named})
        self.numbers, self.needs, self.forwards_to = tuple(numbers), tuple(needs), forwards_to

    def error(self, message: str) -> NoReturn:
        """Raise UserError with argparse's message."""
        raise UserError(f"{message.removeprefix('argument ')}; see --help")

    def add_forwarded(self, title: str, add: Callable[[ArgumentParser], None]) -> None:
        """Add the flags that `add` adds to a parser, under this title; `forwards_to`'s program gets them too."""
        declared, group = ArgumentParser(add_help=False), self.add_argument_group(title)
        add(declared)
        for action in declared._actions:
            group._add_action(_Forwarded(action))

    def borrow(self, group: Any, lender: "ToolParser", names: Iterable[str], **changed: Mapping[str, Any]) -> None:
        """Take flags of another tool into a group, as it declares them, with its intervals unless `numbers` has some.

        `changed`: by attribute name, what is different here, such as {"default": 4}.
        """
        own = {name for one in self.numbers for name in one.names.split()}
        for name in names:
            action = copy(next(action for action in lender._actions if action.dest == name))
            vars(action).update({"required": False, **changed.get(name, {})})
            group._add_action(action)
            held = (one.interval for one in lender.numbers if name in one.names.split() and name not in own)
            self.numbers += tuple(Interval(interval, name) for interval in held)

    @property
    def forwarded(self) -> set[str]:
        """The flags that are passed to another program, and may also stand after --."""
        return {word for action in self._actions if isinstance(action, _Forwarded) for word in action.option_strings}

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and check `numbers` and `needs`. Raises UserError, with a line for each fault."""
        words = [*sys.argv[1:]] if args is None else [*args]
        if self.forwards_to:
            end = words.index("--") if "--" in words else len(words)
            namespace = namespace or Namespace()
            setattr(namespace, self.forwards_to, [word for word in words[end:] if word != "--"])
            words = words[:end]
        self._refuse_unknown(words)
        found, rest = self.parse_known_args(words, namespace)
        if rest:
            raise UserError(f"{' '.join(rest)!r} belongs to no flag; see --help")
        return self._checked(found)

    def defaults(self) -> dict[str, Any]:
        """Return the values of a command line without words, by attribute name."""
        actions = [action for action in self._actions if action.default is not SUPPRESS]
        texts = {action.dest: action for action in actions if isinstance(action.default, str)}
        read = {name: self._get_value(action, action.default) for name, action in texts.items()}
        return {action.dest: action.default for action in actions} | read

    def settings(self, **given: Any) -> Namespace:
        """Return what `parse_args` returns for a command line with these values. Raises UserError as it does."""
        usual = self.defaults()
        assert given.keys() <= usual.keys(), given.keys() - usual.keys()
        return self._checked(Namespace(**usual | given))

    def words(self, **given: Any) -> list[str]:
        """Return a command line for these values, without those that are as usual."""
        usual, words = self.defaults(), list[str]()
        assert given.keys() <= usual.keys(), given.keys() - usual.keys()
        for action in self._actions:
            value = given.get(action.dest)
            if value not in (None, usual.get(action.dest)):
                values = value if action.nargs else [value]
                words += [action.option_strings[0], *([] if action.nargs == 0 else map(shown, values))]
        return words

    def _checked(self, found: Namespace) -> Namespace:
        usual = self.defaults()
        given = {name: value for name, value in vars(found).items() if value != usual.get(name)}
        refuse(outside_intervals(vars(found), self.numbers, self.written))
        refuse(needs_missing(given, found, self.needs, self.written))
        refuse(in_stores(vars(found), self.written))
        return found

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Raise UserError for all unknown flags at once, before argparse complains of what may be their values."""
        refusals = []
        options = [option for action in self._actions for option in action.option_strings]
        for word in words:
            flag = word.partition("=")[0]
            # Abbreviations are allowed, except where they could mean a flag after --.
            known = flag in options if self.forwards_to else any(option.startswith(flag) for option in options)
            if known or not flag.startswith("--"):
                continue
            ours = SYNONYMS.get(flag, "").partition(" ")[0] in options
            follow = f"flags of {self.forwards_to.title()}'s follow --" if self.forwards_to and not ours else ""
            hints = ", ".join(filter(None, (suggestion(flag, options), follow)))
            refusals.append(f"{flag}: no such flag; {hints or 'see --help'}")
        refuse(refusals)

    def written(self, name: str) -> str:
        """Return the flag that sets an attribute, as users write it."""
        return next(action.option_strings[0] for action in self._actions if action.dest == name)


def refuse(lines: Iterable[str]) -> None:
    """Raise UserError with these lines, each once, if there are any."""
    if said := [*dict.fromkeys(lines)]:
        raise UserError(*said)


def refuse_unprintable(words: Iterable[str]) -> None:
    """Raise UserError for a word with control characters, which could steer a terminal or forge lines of a log."""
    for word in words:
        if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in word):
            raise UserError(f"{word[:200]}: has characters that are not to be seen in a log; rename it")


def flag_name(name: str) -> str:
    """Return the usual flag of an attribute: `num_workers` is --num-workers."""
    return f"--{name.replace('_', '-')}"


FURTHER_BUDGETS = " ".join(one.budget for one in FURTHER)
"""Budgets of further modalities, as tables of intervals and needs name them."""


def add_further_budgets(add: Callable[..., Any], words: str) -> None:
    """Add a budget's flag for each modality beyond vision and language with `add`, a parser's `add_argument`; `words`:
    its help, with {units}, {inputs}, {verb}."""
    for one in FURTHER:
        said = words.format(units=one.units, inputs=one.inputs, verb=one.verb)
        add(flag_name(one.budget), type=int, metavar=one.size.upper(), help=said)


def outside_intervals(
    given: Mapping[str, Any], table: Iterable[Interval], written: Callable[[str], str] = flag_name
) -> list[str]:
    """Return a message for every value in `given` ({attribute: value or list}) outside its interval in `table`."""
    intervals = {name: numbers for numbers in table for name in numbers.names.split()}
    return [
        f"{written(name)} must be {_finite(value)}{intervals[name].wanted}, got {value}"
        for name, values in given.items()
        if name in intervals
        for value in (values if isinstance(values, list) else [values])
        if value is not None and not intervals[name].holds(value)
    ]


def needs_missing(
    given: Mapping[str, Any], values: Namespace, table: Iterable[Need], written: Callable[[str], str]
) -> list[str]:
    """Return a message for every flag in `given` whose condition in `table` does not hold.

    `given` are the flags whose values differ from their defaults, `values` those of all flags; by attribute name.
    """
    return [
        f"{flag_with_value(written(name), given[name])} needs {need.needs}"
        for need in table
        for name in need.names.split()
        if name in given and not need.holds(values)
    ]


IN_STORES = ("input", "image_root", "stores", "megatron")
"""Flags that may name a store; the trainer looks at its own."""
_STORE = re.compile(rf"({'|'.join(SCHEMES)}):/{{1,2}}[^/]")
"""Pattern of a store's name, also as a path has it, which joins slashes."""
OF_FILES = "datasets, packs, profiles, plans and saves stay on a file system, whose renames and locks they need"


def in_stores(values: Mapping[str, Any], written: Callable[[str], str]) -> list[str]:
    """Return a line for every flag that names an object store but is not of `IN_STORES`; an address may have keys."""
    return [
        f"{written(name)} {store[1]}://...: {OF_FILES}; only --input and --image-root may name a store"
        for name, given in values.items()
        if name not in IN_STORES
        for value in (given if isinstance(given, list) else [given])
        if isinstance(value, str | PurePath) and (store := _STORE.match(str(value)))
    ]


def _finite(value: float) -> str:
    return "finite and " if isinstance(value, float) and not math.isfinite(value) else ""


def shown(value: object) -> str:
    """Return a flag's value as it is written on a command line; None: it is chosen for the user."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "auto" if value is None else value.name if isinstance(value, Enum) else str(value)


def flag_with_value(flag: str, value: object) -> str:
    """Return a flag with its value or values as one text, as on a command line; a boolean flag alone."""
    if isinstance(value, list):
        return " ".join([flag, *map(shown, value)])
    return flag if isinstance(value, bool) else f"{flag} {shown(value)}"


def given_of(values: Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return {name: value} of these attributes, without those that are None."""
    return {name: value for name in names if (value := getattr(values, name)) is not None}


@contextmanager
def without_defaults(parser: ArgumentParser) -> Iterator[None]:
    """Have the parser return only the flags that are on the command line, inside the block: none has a default."""
    defaults = [(action, action.default) for action in parser._actions]
    for action, _ in defaults:
        action.default = SUPPRESS
    try:
        yield
    finally:
        for action, default in defaults:
            action.default = default


def flag_value(flag: str, words: Sequence[str]) -> str | None:
    """Return a flag's value on a command line, the last if repeated; "": it has none; None: it is not there."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="given", nargs="?", const="")
    given: str | None = parser.parse_known_args(words)[0].given
    return given


_FLAGS = {
    "--lr": "--learning-rate",
    "--train-iters": "--max-steps --train-samples",
    "--epochs of omnibal launch": "--num-epochs --num-train-epochs",
    "--llm-budget and --micro-batches of packing: a microbatch is one pack":
        "--batch-size --rampup-batch-size --step-batch-size-schedule",
    "--micro-batches of packing": "--gradient-accumulation-steps",
    "--llm-budget and --vit-budget of packing: a microbatch is one pack, of at most that size":
        "--micro-batch-size --microbatch-size --per-device-train-batch-size --packing-seq-length --packing-buffer-size",
    "--lr-warmup-iters": "--warmup-steps --lr-warmup-samples --warmup",
    "--lr-warmup-fraction": "--warmup-ratio",
    "--lr-decay-style": "--lr-scheduler-type",
    "--lr-decay-iters": "--lr-decay-samples",
    "--lr-wsd-decay-iters": "--lr-wsd-decay-samples",
    "--clip-grad": "--max-grad-norm",
    "--adam-eps": "--adam-epsilon",
    "--save-interval": "--save-steps",
    "--log-interval": "--logging-steps",
    "--eval-interval": "--eval-steps",
    "--num-workers": "--dataloader-num-workers",
    "--model": "--model-name-or-path --language-model-type --vision-model-type",
    "--model, whose config.json says it": "--pixel-shuffle --disable-vision-class-token",
    "--llm-budget, and --max-tokens of preprocessing": "--max-length --cutoff-len --dataloader-seq-length",
    "--input of preprocessing": "--dataset-config --prompt-path",
    "--eval-data and --eval-packs": "--valid-path --online-evaluation-config",
    "--packs, whose place a save has": "--dataloader-save",
    "--chat-template of preprocessing": "--tokenizer-prompt-format --special-tokens --force-system-message",
    "--max-tiles of preprocessing": "--max-num-tiles",
    "--model, whose tiles and marks preprocessing makes":
        "--use-tiling --use-thumbnail --use-tile-tags --use-image-tag --image-tag-type "
        "--use-area-weighted-aspect-ratio --num-frames",
    "--loss-reduction": "--use-loss-scaling",
    "--memory-gib of planning, by which layers are recomputed": "--recompute-vision",
    "--freeze vit": "--freeze-vit --freeze-ViT --freeze-vision-tower",
    "--freeze llm": "--freeze-llm --freeze-LM",
    "--freeze, which takes parts of the model: vit, projector, llm": "--freeze-all-layers",
    "--lr-vit": "--vision-lr --vision-tower-lr --vit-lr",
    "--lr-projector": "--mm-projector-lr --aligner-lr --merger-lr",
    "--lr-vit and --lr-projector": "--decoupled-lr --decoupled-min-lr",
    "--lora-rank": "--lora-r",
    "--lora-targets, which takes parts of the model: vit, projector, llm": "--lora-target --lora-target-modules",
    "--lora-rank R": "--use-lora --use-llm-lora",
    "--lora-rank R --lora-targets vit": "--use-backbone-lora",
    "nothing: the machine says which kernels there are": "--use-te",
    "nothing: --from has weights for the whole model": "--allow-missing-vision-projection-checkpoint",
    "nothing: adapters have no dropout": "--lora-dropout",
    "nothing: Megatron's --use-distributed-optimizer shards the optimizer": "--deepspeed",
    "nothing: edit the profile.json that --output names, and take manifest_hash out of it": "--measured",
    "--output of omnibal report, whose page draws the timelines": "--png",
    "RUN/checkpoints of omnibal launch, unless it is told": "--save",
}  # fmt: skip
SYNONYMS = {flag: here for here, flags in _FLAGS.items() for flag in flags.split()}
"""Our flag, or a remark, by that of another trainer: transformers, LLaMA-Factory, ms-swift, Megatron-LM's examples."""


def suggestion(flag: str, known: Iterable[str], near: float = 0.7) -> str:
    """Return in words our flag for one of another trainer, or the most similar of the `known` ones; "": none."""
    if flag in SYNONYMS:
        return f"here it is {SYNONYMS[flag]}"
    nearest = difflib.get_close_matches(flag, [*known], 2, near)
    return f"the nearest is {' or '.join(nearest)}" if nearest else ""
