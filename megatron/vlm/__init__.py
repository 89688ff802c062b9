"""Balanced training of vision-language models on Megatron Core.

Importing this package prepares the machine (see `platform`) before `megatron.core` is imported.
"""

from megatron.vlm import log_noise, platform
from omnibal_ext.files.caches import own_torch_caches

log_noise.silence_optional_packages()
platform.prepare()
own_torch_caches()
