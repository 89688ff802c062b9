"""Flags that share a reason."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Some flags of one list.

    `reason` of what is obeyed is the test that shows it; of what is set, who sets it and what to change; of what is
    refused, why. `names` are attribute names of Megatron's arguments, separated by white space.
    """

    reason: str
    names: str
    only: tuple[object, ...] = ()
    """The values that this holds for, others are refused; all values unless given."""

    @property
    def flags(self) -> tuple[str, ...]:
        """The names, one by one."""
        return tuple(self.names.split())
