"""The four lists, and where a flag stands."""

from enum import Enum
from functools import cache

from megatron.vlm.flags.fixed import SET
from megatron.vlm.flags.group import Group
from megatron.vlm.flags.meaningless import WITHOUT_MEANING
from megatron.vlm.flags.obeyed import OBEYED
from megatron.vlm.flags.untested import UNTESTED


class Standing(Enum):
    """What becomes of a flag that is given; the value is what the documentation says of the list."""

    OBEYED = "It does what Megatron says; the test named shows it."
    SET = "Preset, plan, packed index, machine or trainer set it; another value is refused, the same one is accepted."
    WITHOUT_MEANING = "Nothing here would obey it: refused."
    UNTESTED = "Megatron's own affair, which our parts do not touch and our tests do not run: allowed, said in the log."


LISTS: dict[Standing, tuple[Group, ...]] = {
    Standing.OBEYED: OBEYED,
    Standing.SET: SET,
    Standing.WITHOUT_MEANING: WITHOUT_MEANING,
    Standing.UNTESTED: UNTESTED,
}


@cache
def standings() -> dict[str, tuple[Standing, Group]]:
    """Where each flag stands, by its attribute name."""
    return {flag: (standing, group) for standing, groups in LISTS.items() for group in groups for flag in group.flags}
