"""The process that forks programs of the tests as on a machine with GPUs.

Started with the folder `tests` on Python's path and, for a machine with Transformer Engine, `tests/engine`: what stands
in is found before anything of Megatron asks for it.
"""

from cards import machine

machine.install()

from tests.forkserver import main  # noqa: E402 (imports Megatron)

if __name__ == "__main__":
    main()
