"""Tests. Importing `megatron.vlm` first readies the machine for whatever of Megatron they import."""

import megatron.vlm  # noqa: F401
