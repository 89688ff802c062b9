"""Units that people read."""

GIB = 2**30
"""Bytes."""
SHOWN_AS = (("GiB", GIB, 0.1), ("MiB", 2**20, 1.0), ("KiB", 2**10, 1.0))
"""Units, and how many of one there are at least where sizes are said in it: fewer would lose digits."""


def in_bytes(size: float) -> str:
    """A number of bytes in the unit in which it has digits: GiB, as flags have them, or a smaller one."""
    for name, unit, least in SHOWN_AS:
        if size >= least * unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} bytes"
