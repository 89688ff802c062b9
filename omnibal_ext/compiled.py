"""Forgets what numba has compiled of older sources.

Numba keeps a compiled function while its own file is unchanged, although functions of other files are compiled into it:
after an update it would run their old code.
"""

import hashlib
from contextlib import suppress
from pathlib import Path

STAMP = "compiled.stamp"
"""Beside the compiled functions: the sources, by time and size, that they were compiled from."""


def forget_stale(package: Path) -> None:
    """Delete what is compiled in the folders of `package` if a source has changed since; numba compiles it again.

    Nothing happens where the folder cannot be written: what is installed is replaced as a whole.
    """
    with suppress(OSError):
        found = sorted(package.rglob("*.py"))
        states = [(str(path.relative_to(package)), path.stat().st_mtime_ns, path.stat().st_size) for path in found]
        sources = hashlib.sha256(repr(states).encode()).hexdigest()
        stamp = package / "__pycache__" / STAMP
        if stamp.exists() and stamp.read_text() == sources:
            return
        for path in package.rglob("*.nb[ic]"):
            path.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(sources)
