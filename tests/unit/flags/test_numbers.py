"""Every flag that takes a number has an interval, and what lies outside is refused before anything starts."""

import math
from collections import Counter

import pytest

from megatron.vlm.arguments import add_vlm_arguments, read_arguments
from megatron.vlm.flags.lists import ALLOWED
from megatron.vlm.flags.needs import NUMBERS
from megatron.vlm.flags.parser import Parser
from omnibal_ext.errors import UserError
from omnibal_ext.flags import Interval, outside_intervals

COMPLETE = "--preset tiny --lr 1e-3 --train-iters 8"
PARSER = Parser(add_vlm_arguments, [])
ACTIONS = {action.dest: action for action in PARSER._actions if action.type in (int, float) and action.choices is None}
GIVEN = sorted(name for name in ACTIONS if name in PARSER.own or name in ALLOWED)


def test_every_number_that_may_be_given_has_one_interval() -> None:
    assert Counter(name for numbers in NUMBERS for name in numbers.names.split()) == Counter(GIVEN)


def edges(numbers: Interval, whole: bool) -> tuple[list[float], list[float]]:
    """Values inside and outside an interval: at its ends, a little and much beyond them, and what is no number."""
    (left, least, most, right), little = numbers.ends, 1 if whole else 1e-9
    low, high = float(least), float(most)
    inside, outside = [low + little, 0.5 * (low + min(high, low + 4))], [low - little, -1e9]
    (inside if left == "[" else outside).append(low)
    if math.isfinite(high):
        little = max(little, high * 1e-12)
        inside.append(high - little)
        outside += [high + little, 1e300]
        (inside if right == "]" else outside).append(high)
    else:
        inside.append(1e12)
    cast = int if whole else float
    return [cast(value) for value in inside], [*map(cast, outside), *([] if whole else [math.nan, math.inf, -math.inf])]


def test_every_interval_is_held_at_both_ends_and_beyond() -> None:
    wrong = []
    for name in GIVEN:
        (numbers,) = [numbers for numbers in NUMBERS if name in numbers.names.split()]
        many = ACTIONS[name].nargs == "+"
        inside, outside = edges(numbers, ACTIONS[name].type is int)
        taken = {name: [*inside, *outside]} if many else None
        said = outside_intervals(taken, NUMBERS) if taken else [
            line for value in (*inside, *outside) for line in outside_intervals({name: value}, NUMBERS)
        ]  # fmt: skip
        if [line.rpartition("got ")[2] for line in said] != [str(value) for value in outside]:
            wrong.append(name)
        wrong += [f"{name}, unless given" for _ in outside_intervals({name: ACTIONS[name].default}, NUMBERS)]
    assert wrong == []


def test_all_numbers_that_are_refused_are_said_at_once() -> None:
    flags = "--seed 0 --lr nan --adam-beta2 1 --lr-warmup-fraction 1.0 --num-workers 1000000 --weight-decay -1"
    with pytest.raises(UserError) as refused:
        read_arguments(f"{COMPLETE} {flags} --profile-ranks 0 -1 --max-bad-steps -1 --lora-rank 0".split())
    assert sorted(line for line in refused.value.lines if " must be " in line and "--lora-rank" not in line) == [
        "--adam-beta2 must be at least 0 and below 1, got 1.0",
        "--lr must be finite and at least 0 and at most 1e30, got nan",
        "--lr-warmup-fraction must be at least 0 and below 1, got 1.0", "--max-bad-steps must be at least 0, got -1",
        "--num-workers must be at least 0 and at most 128, got 1000000",
        "--profile-ranks must be at least 0 and at most 16383, got -1",
        "--seed must be at least 1 and at most 2147483647, got 0",
        "--weight-decay must be at least 0 and at most 1e30, got -1.0",
    ]  # fmt: skip
