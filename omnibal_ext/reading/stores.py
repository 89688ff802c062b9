"""Object stores by fsspec, S3 by s3fs: paths that a command line names as SCHEME://BUCKET/KEY, and ranges of objects.

The store is the user's alone: what a file says becomes a `StorePath` only in a bucket that the command line named
(`located_in_file`), or below one. Configuration and credentials are fsspec's and s3fs's own; nothing of them is in a
path, a message or what we write.
"""

import errno
import logging
import os
import re
import stat
from collections.abc import Awaitable, Callable, Collection, Iterator
from functools import cache, lru_cache, partial
from itertools import count
from pathlib import Path, PosixPath, PurePosixPath
from random import SystemRandom
from time import monotonic
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from omnibal_ext.errors import UserError, missing_package

if TYPE_CHECKING:
    from concurrent.futures import Future

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
S3 = "s3"
SCHEMES = (S3, "gs", "gcs", "abfs", "az", "memory")
"""Schemes of object stores. What reads hosts that an address names, or this machine's files, is none."""
_BUCKET = re.compile(r"[A-Za-z0-9._-]+")
AT_ONCE = 16
"""Requests of a process that are under way together."""
SECONDS = 20.0
"""Seconds of one try of a request, which asks for at most `MOST_A_REQUEST` bytes."""
PATIENCE = 60.0
"""Seconds of all tries of a request."""
LONGEST = 4 * PATIENCE
"""Seconds that are waited for a request, behind others that were before."""
WAIT, LONGEST_WAIT = 0.25, 8.0
"""Seconds at most before the second try, twice as many before each further one, and before any."""
MOST_A_REQUEST = 2**23
_GONE = frozenset(("NoSuchKey", "NotFound", "404"))
"""Codes of a store's answer that it has no such object."""
_OF_KEYS = (
    "Credential", "ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "TokenRefresh", "SSO",
    "RequestTimeTooSkewed", "Unauthorized", "401", "ProfileNotFound",
)  # fmt: skip
"""Parts of codes of errors about keys."""
_OF_BUCKETS = (
    "NoSuchBucket", "Redirect", "301", "307", "308", "AuthorizationHeaderMalformed", "LocationConstraint",
    "ParamValidation",
)  # fmt: skip
_PASSES = ("SlowDown", "Throttl", "RequestTimeout")
_OF_CONNECTIONS = frozenset(
    ("ConnectionError", "TimeoutError", "HTTPClientError", "IncompleteReadError", "ClientError")
)
"""Classes of Python's, botocore's and aiohttp's errors on the way to a store and back; others do not pass."""
_KEYS = "see to the keys of s3fs (AWS_PROFILE, ~/.aws, FSSPEC_S3_...) and start again: what is done is kept"
_BUCKETS = "see to the bucket's name, region and endpoint (AWS_REGION, AWS_ENDPOINT_URL) and start again"
_ANSWERS = "see to the store and the network, and start again: what is done is kept"
_SETTINGS = "see to the settings of fsspec and its packages, and start again"


class StoreError(UserError):
    """A store gives nothing at all: no fault of an object, so it must not count as one (`raise_if_lost`)."""


class StorePath(PosixPath):
    """An object in a store, or the prefix of several: what readers ask of a `Path`. Names lead below it, or nowhere."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __truediv__(self, name: str | os.PathLike[str]) -> "StorePath":
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts:
            raise UserError(f"{str(name)[:200]!r}: leads out of {self}; names in data are relative, and below it")
        return super().__truediv__(inside)

    @property
    def store(self) -> str:
        """SCHEME://BUCKET."""
        return f"{self.parts[0]}//{self.bucket}"

    @property
    def is_s3(self) -> bool:
        """Whether s3fs reads it, by requests of ours."""
        return self.parts[0] == f"{S3}:"

    @property
    def bucket(self) -> str:
        """Name of the bucket."""
        return self.parts[1]

    @property
    def key(self) -> str:
        """Name of the object in its bucket; "" for all of a bucket."""
        return "/".join(self.parts[2:])

    @property
    def misleads(self) -> bool:
        """Whether its name has "::", "?" or "..", which clients take for chains, versions and the folder above."""
        return "::" in str(self) or "?" in str(self) or ".." in self.parts

    def resolve(self, strict: bool = False) -> "StorePath":
        """Return the path itself."""
        return self

    absolute = resolve

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the size of an object, as that of a regular file. Raises OSError."""
        size = head(self).total
        return os.stat_result((stat.S_IFREG | stat.S_IRUSR, 0, 0, 1, 0, 0, size, 0, 0, 0))

    def exists(self, **_: bool) -> bool:
        """Return whether there is an object of this name, or one below it."""
        return self.is_file() or self.is_dir()

    def is_file(self, **_: bool) -> bool:
        """Return whether there is an object of this name."""
        try:
            head(self)
        except FileNotFoundError:
            return False
        return True

    def is_dir(self, **_: bool) -> bool:
        """Return whether objects are below this prefix; where they may not be listed, whether it has no ending."""
        try:
            return bool(_begin(self, partial(_is_prefix, path=self)).result())
        except PermissionError:
            return not self.suffix

    def rglob(self, pattern: str = "*", **_: Any) -> Iterator["StorePath"]:  # type: ignore[override]
        """Yield all objects below this prefix (`pattern` is "*"), page by page. Raises UserError for keys that a path
        does not keep as they are, and for those that lie elsewhere."""
        token: str | None = None
        while True:
            keys, following = _begin(self, partial(_page, path=self, token=token)).result()
            for key in keys:
                path = type(self)(f"{self.store}/{key}")
                if path.key != key or not key.startswith(_prefix(self)) or path.misleads:
                    raise UserError(f"{self}: lists {key[:200]!r}, of which no path is made here; rename it")
                yield path
            if following is None:
                return
            if following == token:
                raise StoreError(f"{self}: the store lists the same page again and again; {_ANSWERS}")
            token = following


_named = set[str]()


def named_stores() -> frozenset[str]:
    """Return the SCHEME://BUCKET of every store that this process's command line names."""
    return frozenset(_named)


def located(text: str) -> Path:
    """Return the path that a user names on the command line: in a store if it has a scheme, else of a file.

    Raises UserError for what is no object store, for a chain of file systems, and for access keys in the name, which
    manifests would repeat.
    """
    path = _parsed(text)
    if isinstance(path, StorePath):
        _named.add(path.store)
    return path


def store_named(text: str) -> str:
    """Return a store's name as it is, noted as the user's. Raises UserError as `located`, and for a file's name."""
    if not isinstance(located(text), StorePath):
        raise UserError(f"{text[:200]!r}: is no store; name SCHEME://BUCKET")
    return text


def located_in_file(text: str, named: Collection[str]) -> Path:
    """Return the path that a file of a dataset names, as `located`: files may be a stranger's, so in a store only if it
    is one of `named`, the `named_stores` of a command line. Raises UserError for any other."""
    path = _parsed(text)
    if isinstance(path, StorePath) and path.store not in named:
        raise UserError(
            f"{path.store}: is named by a file, not by the command line; if it is yours, give --stores SCHEME://BUCKET"
        )
    return path


def _parsed(text: str) -> Path:
    scheme, is_url, rest = text.partition("://")
    if not is_url or "/" in scheme:
        return Path(text)
    said = f"{scheme if scheme.isalnum() else ''}://..."[:40]
    if scheme not in SCHEMES:
        raise UserError(f"{said}: is no object store; name {', '.join(SCHEMES[:-1])}, as in s3://BUCKET/KEY")
    path = StorePath(text)
    if not _BUCKET.fullmatch(rest.partition("/")[0]) or path.misleads:
        raise UserError(f"{said}: must be SCHEME://BUCKET/KEY, without keys (s3fs has them), chains (::), '?' or '..'")
    return path


class Range(NamedTuple):
    """Bytes of an object; how many it has in all; its mark, which another version of it does not have."""

    content: bytes
    total: int
    mark: str


def read_range(path: StorePath, start: int, size: int) -> Range:
    """Return up to `size` bytes from `start` on. Raises OSError for the object's faults, StoreError for the store's."""
    if not path.key:
        raise FileNotFoundError(errno.ENOENT, "a bucket, which is no object", str(path))
    return answer(path, begin_range(path, start, size))


def begin_range(path: StorePath, start: int, size: int) -> "Future[Range]":
    """Begin to read a range, beside what this process does."""
    return _begin(path, partial(_range, path=path, start=start, size=size))


FIRST = 2**15
"""Bytes of an object that are read with its length and mark: the headers of nearly all media."""


@lru_cache(maxsize=64)
def head(path: StorePath, start: int = 0) -> Range:
    """Return the first bytes of an object, or of what begins in it at `start`; kept for those who ask next. Raises as
    `read_range`."""
    return read_range(path, start, FIRST)


_lost: list[StoreError] = []
os.register_at_fork(after_in_child=_lost.clear)


def answer(path: StorePath, begun: "Future[Range]") -> Range:
    """Return what a request gives; note a StoreError for `raise_if_lost`. Raises as `read_range`."""
    try:
        return begun.result(LONGEST)
    except TimeoutError:
        error = StoreError(f"{path}: the store gives no answer in {LONGEST:g} s; start again")
    except StoreError as found:
        error = found
    _lost[:] = [error]
    raise error


def raise_if_lost() -> None:
    """Raise the StoreError that libraries took for a damaged file, if there was one."""
    if _lost:
        raise _lost.pop()


def _store(path: StorePath) -> Any:
    """Return the file system of a path's scheme, as the user has configured it, with limits where he has none."""
    try:
        import fsspec

        store = fsspec.filesystem(path.parts[0].removesuffix(":"), **(_settings() if path.is_s3 else {}))
    except (ImportError, ValueError) as error:
        why = missing_package(getattr(error.__cause__ or error, "name", None) or "") or str(error)[:200]
        raise UserError(f"{path}: cannot be read: {why}") from error
    store.retries = 1  # `_tried` counts them
    return store


@cache
def _settings() -> dict[str, Any]:
    """Return settings of s3fs, and keep out of a log what clients say of each request: at its lower levels with the
    headers that sign it."""
    from aiobotocore.httpsession import AIOHTTPSession
    from fsspec.config import conf

    class WithoutRedirects(AIOHTTPSession):
        """A session that follows no redirect, which may name any host; botocore asks at the region that S3 names."""

        async def _get_session(self, proxy: str | None) -> Any:
            session = await super()._get_session(proxy)
            return SimpleNamespace(request=partial(session.request, allow_redirects=False))

    for name in ("aiobotocore", "botocore", "fsspec", "s3fs"):
        logging.getLogger(name).setLevel(logging.WARNING)
    limits = {"connect_timeout": SECONDS / 4, "read_timeout": SECONDS, "retries": {"total_max_attempts": 1}}
    given = conf.get(S3, {}).get("config_kwargs", {})
    return {"config_kwargs": {"max_pool_connections": AT_ONCE, **limits, **given, "http_session_cls": WithoutRedirects}}


def _begin(path: StorePath, work: Callable[[Any], Awaitable[Any]]) -> "Future[Any]":
    """Begin what asks a store."""
    store = _store(path)
    from asyncio import run_coroutine_threadsafe  # which those who read no store need not import

    from fsspec.asyn import get_loop

    return run_coroutine_threadsafe(_tried(path, partial(work, store)), get_loop())


@lru_cache(maxsize=1)
def _gate(process: int) -> Any:
    from asyncio import Semaphore

    return Semaphore(AT_ONCE)


async def _tried(path: StorePath, work: Callable[[], Awaitable[Any]]) -> Any:
    """Do the work, again after faults that pass, each time within `SECONDS` and in all within `PATIENCE`."""
    from asyncio import sleep, wait_for

    async with _gate(os.getpid()):
        started = monotonic()
        waits = (min(WAIT * 2**tries, LONGEST_WAIT) * _random.uniform(0.5, 1) for tries in count())
        while True:
            limit = min(SECONDS, PATIENCE - (monotonic() - started))
            try:
                return await wait_for(work(), limit)
            except Exception as error:  # what is below raises nearly anything
                passed = monotonic() - started
                fault, passes = _fault(path, error, limit, passed)
                if not passes or passed + (wait := next(waits)) >= PATIENCE:
                    raise fault from None
            await sleep(wait)


_random = SystemRandom()
"""Source of waits: not the one whose state training keeps, and another in each of many processes."""


def _fault(  # noqa: PLR0911 - a kind of fault a line
    path: StorePath, error: Exception, limit: float, passed: float
) -> tuple[Exception, bool]:
    """Return the error to raise, and whether another try may help, after a try of `limit` seconds and `passed` in all.

    Of what a store says only the code is told: its texts may repeat keys.
    """
    if isinstance(error, UserError):
        return error, False
    cause = error.__cause__ if error.__cause__ and hasattr(error.__cause__, "response") else error
    reply = getattr(cause, "response", None) or {}
    status = reply.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = re.sub(r"\W", "", str(reply.get("Error", {}).get("Code") or type(cause).__name__))[:60]

    def said(of: tuple[str, ...]) -> bool:
        return any(word in code for word in of)

    if said(_OF_KEYS) or status == 401:
        return StoreError(f"{path}: the store refuses the keys ({code}); {_KEYS}"), False
    if said(_OF_BUCKETS) or 300 <= status < 400:
        return StoreError(f"{path}: no such bucket at this place ({code}); {_BUCKETS}"), False
    if (reply and code in _GONE) or (not path.is_s3 and isinstance(error, FileNotFoundError)):
        return FileNotFoundError(errno.ENOENT, "no such object", str(path)), False
    if status == 403 or (not reply and isinstance(error, PermissionError)):
        return PermissionError(errno.EACCES, f"no permission ({code})", str(path)), False
    if 400 <= status < 500 and status != 429 and not said(_PASSES):
        return OSError(errno.EIO, f"the store refuses it ({code})", str(path)), False
    kinds = {kind.__name__ for kind in type(cause).__mro__}
    if not reply and ("SSLError" in kinds or not kinds & _OF_CONNECTIONS):
        return StoreError(f"{path}: the store cannot be asked ({code}); {_SETTINGS}"), False
    why = f"no answer in {limit:.2g} s" if isinstance(cause, TimeoutError) else code
    return StoreError(f"{path}: the store gives no answer ({why}; tried for {passed:.2g} s); {_ANSWERS}"), True


async def _apart(work: Callable[..., Any], *words: Any) -> Any:
    """Do what would keep the loop in a thread of its own."""
    from asyncio import to_thread

    return await to_thread(work, *words)


async def _range(store: Any, path: StorePath, start: int, size: int) -> Range:
    if not path.is_s3:
        return await _apart(_range_of_others, store, path, start, size)
    asked = {"Bucket": path.bucket, "Key": path.key, "Range": f"bytes={start}-{start + size - 1}"}
    try:
        reply = await store._call_s3("get_object", **asked)
    except OSError as error:
        if "InvalidRange" not in str(getattr(error.__cause__, "response", "")) or start:
            raise
        return Range(b"", 0, "0-")  # an object of no bytes has no ranges
    due, total = _promised(path, reply, start, size)
    async with reply["Body"] as body:
        content = await body.read()
    if len(content) != due:
        raise ConnectionError("cut off")
    return Range(content, total, f"{total}-{str(reply.get('ETag', '')).strip(chr(34))}")


_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


def _promised(path: StorePath, reply: dict[str, Any], start: int, size: int) -> tuple[int, int]:
    """Return how many bytes an answer brings, and how many the object has. Raises StoreError, before any of them is
    read, unless these are the bytes that were asked for: a store may send whole objects, of any size."""
    found = _CONTENT_RANGE.fullmatch(str(reply.get("ContentRange", "")))
    first, last, total = map(int, found.groups()) if found else (0, -1, 0)
    due = min(size, total - start)
    if (first, last + 1 - first, reply.get("ContentLength")) != (start, due, due):
        reply["Body"].close()
        raise StoreError(f"{path}: the store does not answer by ranges, which readers of files need; copy them")
    return due, total


def _range_of_others(store: Any, path: StorePath, start: int, size: int) -> Range:
    """Read a range of another file system than S3's, in two requests."""
    name = str(path)
    total = int(store.info(name)["size"])
    content = store.cat_file(name, start=start, end=min(start + size, total)) if start < total else b""
    return Range(content, total, f"{total}-{store.ukey(name)[:40]}")


async def _is_prefix(store: Any, path: StorePath) -> bool:
    if not path.is_s3:
        return bool(await _apart(store.isdir, str(path)))
    reply = await store._call_s3("list_objects_v2", Bucket=path.bucket, Prefix=_prefix(path), MaxKeys=1)
    return bool(reply.get("Contents"))


async def _page(store: Any, path: StorePath, token: str | None) -> tuple[list[str], str | None]:
    """Return some keys below a prefix, and the token of those that follow, if any; of other stores than S3 all."""
    if not path.is_s3:
        names = await _apart(store.find, str(path))
        return [SCHEME.sub("", name, count=1).lstrip("/").partition("/")[2] for name in names], None
    further = {"ContinuationToken": token} if token else {}
    reply = await store._call_s3("list_objects_v2", Bucket=path.bucket, Prefix=_prefix(path), **further)
    keys = (one["Key"] for one in reply.get("Contents", ()))
    return [key for key in keys if not key.endswith("/")], reply.get("NextContinuationToken")


def _prefix(path: StorePath) -> str:
    return f"{path.key}/" if path.key else ""
