"""Units that people read."""

GIB = 2**30
"""Bytes."""
