"""A model of the hub is fetched as a hub on this machine gives it, and only once."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.launch.weights import downloaded

FILES = {"config.json": b'{"model_type": "internvl"}', "model.safetensors": b"x" * 5000, "pytorch_model.bin": b"y"}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FETCH = "import sys; from omnibal_ext.launch.weights import downloaded; print(downloaded(sys.argv[1], quiet=False))"


class Hub(BaseHTTPRequestHandler):
    """One model, OWNER/small: its list of files, and each of them."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        content, found = b"", True
        if path.startswith("/api/models/owner/small"):
            listed = [{"rfilename": each, "size": len(FILES[each])} for each in FILES]
            tree = [{"type": "file", "path": each, "size": len(FILES[each]), "oid": "0" * 40} for each in FILES]
            record = {"id": "owner/small", "sha": COMMIT, "siblings": listed}
            content = json.dumps(tree if "/tree/" in path else record).encode()
        elif path.startswith("/owner/small/resolve/") and name in FILES:
            content = FILES[name]
            self.asked += [name] if self.command == "GET" else []
        else:
            found = False
        self.send_response(200 if found else 404)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Here", (Hub,), {"asked": asked}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()


def fetch(name: str, endpoint: str, cache: Path) -> subprocess.CompletedProcess[str]:
    words = {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", FETCH, name]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | words)


@pytest.mark.slow
def test_a_model_is_fetched_once_after_its_size_is_said(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    endpoint, asked = hub
    first = fetch("owner/small", endpoint, tmp_path)
    assert "owner/small: 0.00 GB are downloaded" in first.stdout, first.stderr
    folder = Path(first.stdout.splitlines()[-1])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: content for name, content in FILES.items() if name != "pytorch_model.bin"
    }
    fetched = len(asked)
    assert fetch("owner/small", endpoint, tmp_path).stdout.splitlines() == [str(folder)]
    assert len(asked) == fetched
    missing = fetch("owner/other", endpoint, tmp_path)
    assert "owner/other: not to be had from the hub" in missing.stderr


@pytest.mark.parametrize("name", ["qwen3-vl-8b", "None", "."])
def test_what_is_no_name_of_the_hub_is_not_fetched(name: str) -> None:
    with pytest.raises(UserError, match=r"--download fetches OWNER/MODEL"):
        downloaded(name, quiet=True)
