"""Of processes of the tests that need a compiled function at the same time one compiles it, for all; or loads it."""

import fcntl
import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from zlib import crc32

from numba.core.caching import NullCache
from numba.core.dispatcher import Dispatcher


@functools.cache
def compile_in_turn() -> None:
    """Have numba wait for whoever compiles the same function; it looks for what is kept behind that.

    Once in a process and its forks, or it would wait for itself.
    """
    compile_now = Dispatcher.compile
    mine: set[str] = set()  # a function that calls itself comes here again
    folder = Path(tempfile.gettempdir(), f"numba-in-turn-{os.getuid()}")
    folder.mkdir(exist_ok=True)

    def compile_once(function: Dispatcher, signature: Any) -> Any:
        code = function.py_func.__code__
        name = f"{crc32(code.co_filename.encode()):08x}-{code.co_name}-{code.co_firstlineno}"
        if isinstance(function._cache, NullCache) or name in mine:
            return compile_now(function, signature)
        with (folder / name).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            mine.add(name)
            try:
                return compile_now(function, signature)
            finally:
                mine.remove(name)

    Dispatcher.compile = compile_once


def load_compiled() -> None:
    """What was compiled earlier is loaded now, once for all forks: each function takes as long as a fork."""
    named = [name for name in sys.modules if name.startswith("omnibal_ext.")]
    functions = {value for name in named for value in vars(sys.modules[name]).values() if isinstance(value, Dispatcher)}
    for function in functions:
        if not isinstance(function._cache, NullCache):
            for signature, *_ in function._cache._cache_file._load_index():
                function.compile(signature)
