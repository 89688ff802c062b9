#!/usr/bin/env -S python3 -SE
"""Stands where a program looks for Python (`sys.executable`); what it should run, a fork of `tests.forkserver` does.

Modules and files only; `-c` is the real Python's, and so are modules that COLD_MODULES names: those whose own child
processes someone looks for. Imports little: to start this must take milliseconds.
"""

import array
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence


def ask(
    path: str,
    program: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    files: Sequence[int] = (0, 1, 2),
    kept: bool = False,
) -> socket.socket:
    """Have a server fork for a program (`kept`: and import it itself); its exit code comes on the socket."""
    request = json.dumps({"program": program, "arguments": list(arguments), "environment": dict(environment),
                          "folder": os.path.realpath("."), "kept": kept}).encode()  # fmt: skip
    server = socket.socket(socket.AF_UNIX)
    server.connect(path)
    server.sendmsg([b"%8d" % len(request)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
    server.sendall(request)
    return server


def _hand_on(server: socket.socket, number: int) -> None:
    """A signal goes to the fork; one that comes when it has ended goes nowhere."""
    with contextlib.suppress(OSError):
        server.sendall(bytes([number]))


def main() -> None:
    words = sys.argv[1:]
    while words and words[0] in ("-u", "-W"):
        del words[: 2 if words[0] == "-W" else 1]
    is_program = words and (words[0] == "-m" or words[0].endswith(".py"))
    if not is_program or words[:2][-1] in os.environ.get("COLD_MODULES", "").split():
        os.execv(os.environ["REAL_PYTHON"], [os.environ["REAL_PYTHON"], *sys.argv[1:]])
    program, *arguments = words[1:] if words[0] == "-m" else words
    with ask(os.environ["WARM_PYTHON"], program, arguments, os.environ) as server:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
            signal.signal(number, lambda number, _: _hand_on(server, number))
        code = int(server.recv(16))  # and no more: behind it an error may come, for a signal that nobody has read
    if code < 0:  # ended by a signal, so end alike
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
