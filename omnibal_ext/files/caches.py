"""Caches of compiled code that others may have written are passed over: what is read there runs as the user.

numba's index is a pickle; torch's inductor and Triton keep pickles and machine code. As with ssh's keys, a folder is
trusted if nobody but the user and root owns or may write it, what is in it and the folders above it.
"""

import atexit
import getpass
import grp
import hashlib
import os
import pwd
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from omnibal_ext.output import say

WRITABLE = stat.S_IWGRP | stat.S_IWOTH
COMPILED = (".nbi", ".nbc")
"""Endings of numba's files."""


def why_foreign(folder: Path) -> str:
    """Return in words what others own or may write of a folder: it, a folder above it, anything in it; "": nothing.

    A folder above it may be open to all if only owners may rename in it, as in /tmp. What is not there is nobody's.
    """
    for start in dict.fromkeys((folder.absolute(), folder.resolve())):
        for path in (start, *start.parents):
            with suppress(OSError):
                found = path.lstat()
                is_shared = path != start and found.st_mode & stat.S_ISVTX
                if why := _why(found, allowed=WRITABLE if is_shared else 0):
                    return f"{path} {why}"
    with suppress(OSError):
        is_closed = not folder.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH)  # no way leads to what is in it
        for entry in _within(folder):
            if why := _why(entry.stat(follow_symlinks=False), allowed=WRITABLE if is_closed else 0):
                return f"{entry.path} {why}"
    return ""


def why_foreign_beside(package: Path) -> str:
    """Return in words which compiled file of numba's in a package more users may write than its sources; "": none."""
    for folder, names, _ in os.walk(package):
        if "__pycache__" not in names:
            continue
        code, compiled = os.stat(folder), os.path.join(folder, "__pycache__")  # noqa: PTH116, PTH118  # quick
        with suppress(FileNotFoundError), os.scandir(compiled) as entries:
            kept = {entry.path: entry.stat(follow_symlinks=False) for entry in entries if entry.name.endswith(COMPILED)}
            for path, found in {compiled: os.lstat(compiled), **kept}.items():
                if why := _why(found, code.st_mode & WRITABLE, code.st_uid):
                    return f"{path} {why}"
    return ""


def own_numba_cache(package: Path) -> Path | None:
    """Set NUMBA_CACHE_DIR to a folder of the user's own, and say so, if others may write numba's cache of a package.

    Returns that folder; None: numba's place is safe, and stays.
    """
    given = os.environ.get("NUMBA_CACHE_DIR")
    why = _made(Path(given)) if given else why_foreign_beside(package) or why_foreign(_kept() / "numba")
    if not why:
        return None
    digest = hashlib.sha256(str(package).encode()).hexdigest()[:12]
    own = _use_own("NUMBA_CACHE_DIR", f"numba-{digest}", why)
    if "numba" in sys.modules:  # it has read its environment
        sys.modules["numba"].config.CACHE_DIR = str(own)
    return own


def are_foreign(folders: list[str]) -> bool:
    """Return whether others may write one of the folders (`why_foreign`); prints which, and why. For shell scripts."""
    reasons = [why for folder in folders if (why := why_foreign(Path(folder)))]
    for reason in reasons:
        say(f"warning: {reason}: what is kept there is not used", error=True)
    return bool(reasons)


def own_torch_caches() -> None:
    """Have torch's inductor and Triton use cache folders of the user's own where others may write theirs, and say
    so."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    # Its place without that: made before others make it.
    with suppress(KeyError, OSError):
        given = given or str(Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"))
    if given and (why := _made(Path(given))):
        _use_own("TORCHINDUCTOR_CACHE_DIR", "torchinductor", why)
    given = os.environ.get("TRITON_CACHE_DIR")
    if why := _made(Path(given)) if given else why_foreign(_home(".triton/cache")):
        _use_own("TRITON_CACHE_DIR", "triton", why)


def _made(folder: Path) -> str:
    """Make a folder that only the user may enter, if it is not there, and return what `why_foreign` says of it."""
    with suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return why_foreign(folder)


def _use_own(variable: str, name: str, why: str) -> Path:
    """Return a cache folder of the user's own, if need be a temporary one; say `why`, and set the environment
    `variable` to it."""
    own = _kept() / "omnibal" / name
    if _made(own) or not os.access(own, os.W_OK):
        own = Path(tempfile.mkdtemp(prefix="omnibal-cache-"))
        atexit.register(shutil.rmtree, own, ignore_errors=True)
    os.environ[variable] = str(own)
    with suppress(OSError):  # stderr is closed
        say(
            f"warning: {why}: compiled code there is not used, but {own}; set {variable} to a folder of yours alone "
            "(mode 700)",
            error=True,
        )
    return own


def _kept() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or _home(".cache"))


def _home(name: str) -> Path:
    return Path(os.path.expanduser("~"), name)  # noqa: PTH111  # raises nothing where there is no home


def _within(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield all files and folders inside a folder, at any depth; what cannot be read is passed over."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _within(Path(entry.path))


def _why(found: os.stat_result, allowed: int = 0, owner: int = 0) -> str:
    """Return in words that a file is not this user's, root's or `owner`'s, or that others may write it; "": neither.
    `allowed`: permission bits that may be set."""
    if found.st_uid not in (0, os.geteuid(), owner):
        return f"belongs to another user ({found.st_uid})"
    bits = 0 if stat.S_ISLNK(found.st_mode) else found.st_mode & WRITABLE & ~allowed
    if bits & stat.S_IWOTH:
        return "may be written by everybody"
    return "may be written by its group" if bits and not _is_own_group(found.st_gid) else ""


def _is_own_group(group: int) -> bool:
    """Say whether a group is the user's own, which has their name and no other member, as many systems make it."""
    try:
        user, named = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return (group, named.gr_name) == (user.pw_gid, user.pw_name) and {*named.gr_mem} <= {user.pw_name}
