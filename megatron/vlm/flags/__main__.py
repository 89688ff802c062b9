"""Prints docs/flags.md."""

from megatron.vlm.flags.table import document

if __name__ == "__main__":
    print(document(), end="")
