"""What the launcher takes for the trainer: the same flags, said before -- or behind it."""

from argparse import Action, Namespace

import pytest

from megatron.vlm.arguments import add_vlm_arguments
from megatron.vlm.flags.lists import ALLOWED
from megatron.vlm.flags.parser import Parser
from omnibal_ext.errors import UserError
from tests.flag_page import megatron_actions
from tools import launch

RUN = ["--model", "tiny", "--run-dir", "run", "--data", "data", "--packs", "packs"]
TRAINER = Parser(add_vlm_arguments, [])
LAUNCHER = launch._parser()
FORWARDED_FLAGS = [action for action in LAUNCHER._actions if set(action.option_strings) <= LAUNCHER.forwarded]


def value_of(action: Action) -> list[str]:
    if action.nargs == 0:
        return []
    words = [str(choice) for choice in action.choices] if action.choices else ["0.5" if action.type is float else "3"]
    return words if action.nargs == "+" else words[:1]


def parsed(*words: str) -> Namespace:
    found: Namespace = LAUNCHER.parse_args([*RUN, *words])
    return found


def test_every_flag_of_our_trainer_is_a_flag_of_the_launcher() -> None:
    ours = {word for action in TRAINER._actions if action.dest in TRAINER.own for word in action.option_strings}
    known = {word for action in LAUNCHER._actions for word in action.option_strings}
    assert ours - known == set()


@pytest.mark.parametrize("action", FORWARDED_FLAGS, ids=lambda action: action.option_strings[0])
def test_a_flag_means_before_the_dashes_what_it_means_behind(action: Action) -> None:
    words = [action.option_strings[0], *value_of(action)]
    before, behind = parsed(*words).megatron, parsed("--", *words).megatron
    trainer = [Parser(add_vlm_arguments, ["--model", "tiny", *given]).given() for given in (before, behind)]
    assert trainer[0] == trainer[1]
    assert vars(trainer[0]).keys() == {"preset", action.dest}
    with pytest.raises(UserError, match="is given twice"):
        parsed(*words, "--", *words)


def test_what_the_launcher_says_of_megatron_s_flags_is_so() -> None:
    """Types and numbers of words as Megatron's parser has them; none that a run may not give."""
    theirs = {action.dest: action for action in megatron_actions()}
    lifted = [action for action in FORWARDED_FLAGS if action.dest not in TRAINER.own]
    assert lifted
    for action in lifted:
        real = theirs[action.dest]
        assert set(action.option_strings) <= set(real.option_strings)
        assert (action.nargs, action.type or str) == (real.nargs, real.type or str)
        assert action.choices is None or [*action.choices] == [*(real.choices or ())]
        assert action.dest in ALLOWED
