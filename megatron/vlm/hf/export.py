"""--save-hf: every save is exported to Hugging Face's format as well, by a process that rank 0 starts.

SAVE/iter_0000200       a save of the trainer
SAVE/iter_0000200-hf    the same as omnibal convert --to-hf writes it; appears when it is complete

python -m megatron.vlm.hf.export SAVE/iter_0000200 LIKE
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
from omnibal_ext.launch.processes import kill_with_parent
from omnibal_ext.output import say


class SaveExporter:
    """An exporter of a run's saves, one at a time. `like`: a folder that `check_like` accepts."""

    def __init__(self, like: Path) -> None:
        self.like = like
        self._running: tuple[Path, subprocess.Popen[str]] | None = None
        atexit.register(self.wait)

    def export(self, save: Path) -> None:
        """Start exporting a complete save, after waiting for the export before."""
        self.wait()
        command = [sys.executable, "-W", "ignore", "-m", "megatron.vlm.hf.export", str(save), str(self.like)]
        process = subprocess.Popen(
            command,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # GPUs belong to the ranks
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running = save, process

    def wait(self) -> None:
        """Wait for the running export. A failed one prints a warning and does not stop the run."""
        if not self._running:
            return
        (save, process), self._running = self._running, None
        said = process.communicate()[1].splitlines()
        for line in said:
            if line.startswith("warning: "):
                say(line)
        if process.returncode:
            errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")] or said
            why = errors[-1] if errors else f"exit code {process.returncode}"
            say(f"warning: {export_folder(save)}: not written ({why}); training goes on without it")


def export_folder(save: Path) -> Path:
    """Return the folder of a save's export."""
    return save.with_name(f"{save.name}-hf")


def check_like(folder: Path | None) -> Path:
    """Return the folder, if it lists the weights of a Hugging Face model. Raises UserError otherwise."""
    if folder and ((folder / LISTING).is_file() or weight_files(folder)):
        return folder
    raise UserError(
        "--save-hf: nothing says what Hugging Face's model looks like; start --from a folder of theirs, or from one "
        "that was converted, or leave it out"
    )


def main() -> None:
    """Export the save that sys.argv names to a folder next to it."""
    kill_with_parent(os.getppid())
    save, like = map(Path, sys.argv[1:])
    with building(export_folder(save)) as folder:
        to_hugging_face(save.parent, folder, like, int(save.name.removeprefix("iter_")))


if __name__ == "__main__":
    run_tool(main)
