"""Units that people read."""

GIB = 2**30
"""Bytes."""
MIB = 2**20
"""Bytes."""


def size_text(count: float) -> str:
    """Bytes for people: of small ones GiB would be 0.0."""
    return f"{count / GIB:,.1f} GiB" if count >= GIB else f"{count / MIB:,.1f} MiB"
