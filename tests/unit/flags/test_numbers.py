"""Every flag that takes a number has an interval, and what lies outside is refused before anything starts."""

import math
from collections import Counter

import pytest

from megatron.vlm.arguments import add_vlm_arguments, read_arguments
from megatron.vlm.flags.lists import Standing, standings
from megatron.vlm.flags.numbers import NUMBERS
from megatron.vlm.flags.parser import Parser
from omnibal_ext.errors import UserError
from omnibal_ext.flags import Numbers, check_numbers, takes_numbers

COMPLETE = "--preset tiny --lr 1e-3 --train-iters 8"
PARSER = Parser(add_vlm_arguments, [])
ACTIONS = {action.dest: action for action in PARSER._actions if takes_numbers(action)}
GIVEN = {name for name in ACTIONS if name in PARSER.own or standings()[name][0] in (Standing.OBEYED, Standing.UNTESTED)}
LISTED = Counter(name for numbers in NUMBERS for name in numbers.names.split())


def test_every_number_that_may_be_given_has_one_interval() -> None:
    assert set(LISTED) == GIVEN
    assert set(LISTED.values()) == {1}


def edges(numbers: Numbers, whole: bool) -> tuple[list[float], list[float]]:
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


@pytest.mark.parametrize("name", sorted(GIVEN))
def test_an_interval_is_held_at_both_ends_and_beyond(name: str) -> None:
    (numbers,) = [numbers for numbers in NUMBERS if name in numbers.names.split()]
    many = ACTIONS[name].nargs == "+"
    inside, outside = edges(numbers, ACTIONS[name].type is int)
    for value in inside:
        check_numbers({name: [value] if many else value}, NUMBERS)
    for value in outside:
        with pytest.raises(UserError, match=r"must be ") as refused:
            check_numbers({name: [inside[0], value] if many else value}, NUMBERS)
        assert str(refused.value).endswith(f"got {value}")


@pytest.mark.parametrize("name", sorted(GIVEN))
def test_what_a_flag_is_unless_given_lies_in_its_interval(name: str) -> None:
    check_numbers({name: ACTIONS[name].default}, NUMBERS)


@pytest.mark.parametrize(
    ("flags", "limit"),
    [
        ("--train-iters 0", "at least 1"),
        ("--train-iters -3", "at least 1"),
        ("--log-interval 0", "at least 1"),
        ("--log-interval -1", "at least 1"),
        ("--num-workers -1", "at least 0"),
        ("--num-workers 1000000", "at most 128"),
        ("--tensorboard-log-interval 0", "at least 1"),
        ("--seed -1", "at least 1"),
        ("--seed 0", "at least 1"),
        ("--lr-decay-iters -5", "at least 1"),
        ("--weight-decay -1", "at least 0"),
        ("--adam-beta1 1.5", "below 1"),
        ("--adam-beta2 1", "below 1"),
        ("--hidden-dropout 1.5", "below 1"),
        ("--attention-dropout -0.1", "at least 0"),
        ("--init-method-std -1", "at least 0"),
        ("--distributed-timeout-minutes 0", "at least 1"),
        ("--distributed-timeout-minutes -1", "at least 1"),
        ("--lr-warmup-fraction 1.0", "below 1"),
        ("--lr inf", "finite and at least 0"),
        ("--lr 1e39", "at most 1e30"),
        ("--lr nan", "at least 0"),
        ("--clip-grad nan", "at least 0"),
        ("--clip-grad -1", "at least 0"),
        ("--eval-interval -2", "at least 1"),
        ("--max-bad-samples -1", "at least 0"),
        ("--max-bad-steps -1", "at least 0"),
        ("--fp16 --loss-scale 1e39", "at most 3.4e38"),
        ("--manual-gc --manual-gc-interval -1", "at least 0"),
        ("--overlap-grad-reduce --ddp-num-buckets 0", "at least 1"),
        ("--profile-ranks 0 -1", "at least 0"),
    ],
)
def test_a_command_line_with_such_a_number_is_refused_in_one_line(flags: str, limit: str) -> None:
    with pytest.raises(UserError) as refused:
        read_arguments(f"{COMPLETE} {flags}".split())
    message = str(refused.value)
    flag = [word for word in flags.split() if word.startswith("--")][-1]
    assert message.startswith(f"{flag} must be ")
    assert limit in message
    assert message.rpartition("got ")[2] in (flags.rsplit(maxsplit=1)[-1], str(float(flags.rsplit(maxsplit=1)[-1])))
    assert "\n" not in message


def test_all_numbers_that_are_refused_are_said_at_once() -> None:
    with pytest.raises(UserError) as refused:
        read_arguments(f"{COMPLETE} --seed -1 --adam-beta1 2 --log-interval 1".split())
    assert str(refused.value) == "--seed must be at least 1 and at most 2147483647, got -1; " \
        "--adam-beta1 must be at least 0 and below 1, got 2.0"  # fmt: skip
