"""Units of bytes in messages."""

GIB = 2**30
"""Bytes of a GiB."""
SHOWN_AS = (("GiB", GIB, 0.1), ("MiB", 2**20, 1.0), ("KiB", 2**10, 1.0))
"""(unit, bytes, least number of units for a size to be shown in this unit)."""


def in_bytes(size: float) -> str:
    """Return a number of bytes as text, in GiB or, if that would show no digits, a smaller unit."""
    for name, unit, least in SHOWN_AS:
        if size >= least * unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} bytes"
