"""Megatron's torch_dist checkpoints, a weight at a time, without Megatron and without a process group.

OURS/latest_checkpointed_iteration.txt    "release": training starts at iteration 0 with a fresh optimizer
OURS/release/                             unsharded weights under the chain's names, for any layout; checksums
OURS/huggingface/                         config.json, tokenizer and so on, for --model and for the export
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from megatron.vlm.checkpoint.folder import INTEGRITY, RELEASE, TRACKER, Checkpoints
from megatron.vlm.checkpoint.integrity import seal_by_one_process
from megatron.vlm.checkpoint.safe import SaveReader, read_weight
from omnibal_ext.adapters import SUFFIX
from omnibal_ext.files.records import verify_checksums, write_text

COMMON = "common_state/shard_0_1"
"""Key under which megatron.core keeps what is no tensor."""


class _Lazily(DefaultSavePlanner):
    """A save planner that plans with meta tensors and makes each one when it is written."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self.make = make

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return self.make(write_item.index.fqn)


def write_release(
    folder: Path, shapes: Mapping[str, Tensor], make: Callable[[str], Tensor], run: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint of the weights in `shapes` (meta tensors); `make(name)` gives each one when it is written.

    `run`: what integrity.json records of the run, such as adapters.
    """
    release = folder / RELEASE
    release.mkdir(parents=True)
    state: dict[str, Any] = {**shapes, COMMON: [{"checkpoint_version": 3.0, "iteration": 0}]}
    dcp.save(
        state,
        # A file a weight: torch holds on to all tensors of a file until it is written.
        storage_writer=dcp.FileSystemWriter(release, single_file_per_rank=False, thread_count=1),
        planner=_Lazily(make),
        no_dist=True,
    )
    write_text(release / "metadata.json", json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    seal_by_one_process(release, run or {})
    write_text(folder / TRACKER, RELEASE)


class OurCheckpoint:
    """A checkpoint of the trainer or of `write_release`: of iteration `step`, or the newest complete one.

    Raises UserError if there is none, it cannot be read safely, or it is of another format.
    """

    def __init__(self, folder: Path, trust: bool = False, step: int | None = None) -> None:
        self.save = Checkpoints(folder).newest(step, trust)
        self.folder = self.save.path
        self._reader = SaveReader(self.folder, trust)
        self.weights = {
            name: entry
            for name, entry in self._reader.contents.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and name.startswith("links.")
        }

    @property
    def adapters(self) -> set[str]:
        """Names of adapters in `weights`."""
        return {name for name in self.weights if name.rpartition(".")[0].endswith(SUFFIX)}

    def verify(self) -> None:
        """Read every byte and compare with the checksums. Raises UserError naming the file."""
        verify_checksums(self.folder, self.save.integrity["files"], "take an older save, or make it anew")

    @property
    def run(self) -> dict[str, Any]:
        """Record of the run that saved it (`megatron.vlm.checkpoint.run`); empty for converted weights."""
        return dict(self.save.integrity["run"]) if (self.folder / INTEGRITY).exists() else {}

    @property
    def preset(self) -> Path | None:
        """Folder of the run's --model, if it exists."""
        return self._existing("preset")

    @property
    def first(self) -> Path | None:
        """Folder of the run's --from, if it still exists."""
        return self._existing("from")

    def _existing(self, name: str) -> Path | None:
        folder = self.run.get(name)
        return Path(folder) if folder and Path(folder).exists() else None

    def tensor(self, name: str) -> Tensor:
        """Read one weight, unsharded."""
        return read_weight(self._reader, name, self.weights[name])
