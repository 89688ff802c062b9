"""Flags that share a reason."""

from dataclasses import dataclass

from omnibal_ext.flags import shown


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

    @property
    def allowed(self) -> str:
        """The values that this holds for, as they are written; "" for all."""
        return " or ".join(map(shown, self.only))
