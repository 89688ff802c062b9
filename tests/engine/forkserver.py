"""The process that forks programs of the tests as on a machine with Transformer Engine.

Started with this folder on Python's path, where the stand-in is found before anything of Megatron asks for it.
"""

import transformer_engine  # noqa: F401 (before Megatron: what is imported already is hidden from nobody)

from megatron.vlm import platform
from tests.forkserver import main

if __name__ == "__main__":
    platform.HAS_TRANSFORMER_ENGINE = True
    main()
