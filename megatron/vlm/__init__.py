"""Balanced training of vision-language models on Megatron Core.

Importing this package prepares the machine (see `platform`) before `megatron.core` is imported.
"""

from megatron.vlm import log_noise, platform

log_noise.silence_optional_packages()
platform.prepare()
