"""The deciding half of OmniBal: packing, layouts, schedules, simulation. Needs numpy and numba, never torch."""

import hashlib
from contextlib import suppress
from pathlib import Path

from omnibal_ext.files.caches import own_numba_cache

STAMP = "compiled.stamp"
"""Next to the compiled functions: a hash of the sources that they were compiled from."""


def forget_stale(package: Path, cache: Path | None = None) -> None:
    """Delete what numba has compiled in the folders of `package`, or in `cache`, if a source that uses it has changed.

    Numba keeps a compiled function while its own file is unchanged, although functions of other files are compiled into
    it: after an update it would run their old code. Nothing happens where the folder cannot be written: what is
    installed is replaced as a whole.
    """
    with suppress(OSError):
        texts = (path.read_bytes() for path in sorted(package.rglob("*.py")))
        sources = hashlib.sha256(b"".join(text for text in texts if b"numba" in text)).hexdigest()
        stamp = (cache or package / "__pycache__") / STAMP
        if stamp.exists() and stamp.read_text() == sources:
            return
        for path in (cache or package).rglob("*.nb[ic]"):
            path.unlink(missing_ok=True)
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(sources)


forget_stale(Path(__file__).parent, own_numba_cache(Path(__file__).parent))
