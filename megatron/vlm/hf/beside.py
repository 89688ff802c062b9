"""Hugging Face's weights beside every save (--save-hf), written by a process beside the first rank, which trains on.

SAVE/iter_0000200       a save of the trainer
SAVE/iter_0000200-hf    as tools/convert_checkpoint.py --to-hf writes it; there once all of it is

python -m megatron.vlm.hf.beside SAVE/iter_0000200 LIKE
"""

import atexit
import os
import subprocess
import sys
from pathlib import Path

from megatron.vlm.hf.convert import LISTING, to_hugging_face
from omnibal_ext.architectures.folder import weight_files
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.files.folders import building
from omnibal_ext.output import say
from omnibal_ext.parent_watch import kill_with_parent


class Beside:
    """The exports of a run's saves, one after the other. `like` says what Hugging Face's model looks like."""

    def __init__(self, like: Path) -> None:
        self.like = like
        self._under_way: tuple[Path, subprocess.Popen[str]] | None = None
        atexit.register(self.wait)

    def export(self, save: Path) -> None:
        """Begin with a save that is whole, once the one before is done."""
        self.wait()
        command = [sys.executable, "-W", "ignore", "-m", "megatron.vlm.hf.beside", str(save), str(self.like)]
        process = subprocess.Popen(
            command,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # devices are the ranks'
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._under_way = save, process

    def wait(self) -> None:
        """Until none is under way. One that failed is said, and ends no run."""
        if not self._under_way:
            return
        (save, process), self._under_way = self._under_way, None
        said = process.communicate()[1].splitlines()
        if process.returncode:
            errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")] or said
            why = errors[-1] if errors else f"exit code {process.returncode}"
            say(f"warning: {exported(save)}: not written ({why}); training goes on without it")


def exported(save: Path) -> Path:
    """Where a save lies as Hugging Face's."""
    return save.with_name(f"{save.name}-hf")


def check_like(folder: Path | None) -> Path:
    """The folder, if it says which weights Hugging Face's model has. Raises UserError if not, or if there is none."""
    if folder and ((folder / LISTING).is_file() or weight_files(folder)):
        return folder
    raise UserError(
        "--save-hf: nothing says what Hugging Face's model looks like; start --from a folder of theirs, or from one "
        "that was converted, or leave it out"
    )


def main() -> None:
    """Export one save."""
    kill_with_parent(os.getppid())
    save, like = map(Path, sys.argv[1:])
    with building(exported(save)) as folder:
        to_hugging_face(save.parent, folder, like, int(save.name.removeprefix("iter_")))


if __name__ == "__main__":
    run_tool(main)
