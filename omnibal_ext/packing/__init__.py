"""Samples to packs, packs to iterations. `from omnibal_ext.packing import pack` is for samples in memory."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Return `pack` or `warm_up`, loading the packers only now: importing a module of this package must not."""
    if name not in ("pack", "warm_up"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from omnibal_ext.packing import in_memory

    return getattr(in_memory, name)
