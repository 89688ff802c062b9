"""Optional kernels of other packages, asked for by the function that is called and by what it is called with.

A package's name says little: `flash-attn-4` brings a package `flash_attn` without the functions of flash-attn 2, and
packages are installed without their kernels, for another torch, or under a name that is another project's too.
"""

import importlib
import importlib.util
import inspect
import sys

UNUSABLE: dict[str, str] = {}
"""Modules that are installed and not used, and why."""


def installed(module: str) -> bool:
    """Return whether a module can be found, without importing it: that may still fail."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a package around it cannot be imported
        return False


def usable(module: str, function: str, *parameters: str) -> bool:
    """Check whether a module can be imported and has a function or class with these parameters (`UNUSABLE`: why not).

    What cannot be imported is hidden from Megatron, which may not outlive the try. Functions of compiled modules do not
    say what they take: being there is enough.
    """
    package = module.partition(".")[0]
    if not installed(package):
        return False
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as error:
        UNUSABLE[module] = " ".join(str(error).split())
        broken = module if sys.modules.get(package) else package  # a part of one, whose other kernels may be usable
        sys.modules[broken] = None  # type: ignore[assignment]
        return False
    if found is None:
        UNUSABLE[module] = f"it has no {function}: another package of this name, or a part of one"
        return False
    try:
        missing = [name for name in parameters if name not in inspect.signature(found).parameters]
    except (ValueError, TypeError):
        missing = []
    if missing:
        UNUSABLE[module] = f"{function} does not take {', '.join(missing)}: another version is needed"
    return not missing
