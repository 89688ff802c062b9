"""Serves Pythons that have behind them what our code imports of others (torch, Megatron, numba), and nothing of ours.

    python -P tests/mutations/warm.py SOCKET

A fork imports our code from where its PYTHONPATH leads: from a copy of the repository with a fault in it, say.
"""

import gc
import importlib
import os
import socket
import sys
import typing
from pathlib import Path

import typing_extensions

ROOT = Path(__file__).parents[2]
OTHERS = (
    *("pytest", "hypothesis", "hypothesis.strategies", "hypothesis.internal.conjecture.engine", "rich.table"),
    *("numba.typed", "scipy.linalg", "scipy.optimize", "sklearn.datasets", "PIL.Image", "PIL.ImageDraw", "jinja2"),
    *("torch.distributed.run", "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend"),
    *("torch.utils.tensorboard", "safetensors.torch", "transformers.models.auto", "tokenizers", "sentencepiece"),
    *("megatron.training.training", "megatron.training.initialize", "megatron.core.models.mimo"),
    *("megatron.core.tokenizers.text.text_tokenizer", "megatron.core.tokenizers.text.models"),
)


def main() -> None:
    """Import, forget what of ours serves, serve until stdin ends."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as on every machine without a compiler
    if not hasattr(typing, "override"):  # Python 3.11: what `megatron.vlm.platform` does before Megatron is imported
        typing.override = typing_extensions.override  # type: ignore[assignment]
    for module in OTHERS:
        importlib.import_module(module)
    importlib.import_module("PIL.Image").init()
    importlib.import_module("numba").njit(lambda: 0)()
    # Not as a module of `tests`, which imports our part of Megatron.
    sys.path[:0] = ours = [str(ROOT / "tests"), str(ROOT)]
    server = importlib.import_module("forkserver")
    del sys.path[: len(ours)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("forkserver", "omnibal_ext")]:
        del sys.modules[name]
    megatron = [path for path in sys.modules["megatron"].__path__ if path != str(ROOT / "megatron")]
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        job = server.serve_interpreters(listener, sys.stdin.fileno())
    sys.path[:0] = folders = os.environ["PYTHONPATH"].split(os.pathsep)
    # Megatron's namespace has been looked for already; our part of it is to be found here first.
    sys.modules["megatron"].__path__ = [*(f"{folder}/megatron" for folder in folders), *megatron]
    server.become(job)


if __name__ == "__main__":
    main()
