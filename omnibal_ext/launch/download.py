"""`--download`: fetches a model of the Hugging Face hub into the hub's cache, after saying how large it is."""

import re
from pathlib import Path

from omnibal_ext.architectures.presets import HUB_NAME
from omnibal_ext.errors import UserError
from omnibal_ext.output import say

FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
"""What a model's folder needs here: weights, configurations, chat template, tokenizer."""


def downloaded(name: str, quiet: bool) -> str:
    """The folder of the model OWNER/MODEL in the hub's cache (`HF_HOME`), fetched as far as it is not there.

    Raises:
        UserError: the name is none of the hub's, or the hub does not give it.
    """
    found = HUB_NAME.fullmatch(name)
    if Path(name).exists() or not found:
        raise UserError(f"--download fetches OWNER/MODEL of the Hugging Face hub; {name} is no such name: leave it out")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError("--download needs huggingface_hub: pip install 'omnibal[train]'") from None
    try:
        files = snapshot_download(found[3], allow_patterns=FILES, dry_run=True)
        missing = sum(file.file_size or 0 for file in files if file.will_download)
        if missing and not quiet:
            say(f"{found[3]}: {missing / 1e9:.2f} GB are downloaded, and kept in the hub's cache")
        return str(snapshot_download(found[3], allow_patterns=FILES))
    except (
        OSError,
        ValueError,
        RuntimeError,
    ) as error:
        reason = re.sub(r"\s+", " ", str(error)).strip()[:300]
        raise UserError(
            f"{name}: not to be had from the hub ({reason}); give a folder that has been downloaded"
        ) from None
