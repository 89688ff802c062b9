"""Megatron distributed checkpoints (torch_dist), a weight at a time, without Megatron and without a process group.

OURS/latest_checkpointed_iteration.txt    "release": training starts at iteration 0 with a fresh optimizer
OURS/release/                             weights under the chain's names, whole: any layout reads its part
OURS/huggingface/                         what the weights came with, for --model and for the way back
"""

import io
import json
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from omnibal_ext.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
COMMON = "common_state/shard_0_1"
"""Where core looks for what is no tensor."""


class _Lazily(DefaultSavePlanner):
    """Plans with empty tensors; makes each one when its turn to be written has come."""

    def __init__(self, make: Callable[[str], Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self.make = make

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        return self.make(write_item.index.fqn)


def write_release(folder: Path, shapes: Mapping[str, Tensor], make: Callable[[str], Tensor]) -> None:
    """Write a checkpoint of the weights named in `shapes` (tensors on the meta device), each given by `make`(name)."""
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
    (release / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (folder / TRACKER).write_text(RELEASE)


class OurCheckpoint:
    """A checkpoint of the trainer or of `write_release`, at its latest iteration.

    Raises UserError if there is none, or it is of another format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = latest(folder)
        self._reader = _Reader(self.folder)
        metadata = self._reader.read_metadata().state_dict_metadata
        self.weights = {
            name: entry
            for name, entry in metadata.items()
            if isinstance(entry, TensorStorageMetadata) and name.startswith("links.")
        }

    @property
    def arguments(self) -> Namespace:
        """The arguments of the run that saved it; empty for converted weights."""
        state: dict[str, Any] = {COMMON: io.BytesIO()}
        dcp.load(state, storage_reader=self._reader, no_dist=True)
        return state[COMMON][0].get("args") or Namespace()

    @property
    def preset(self) -> Path | None:
        """The --model that the checkpoint was trained with, where that is a folder."""
        preset = getattr(self.arguments, "preset", None)
        return Path(preset) if preset and Path(preset).exists() else None

    def tensor(self, name: str) -> Tensor:
        """One weight, whole, read now."""
        entry = self.weights[name]
        state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
        dcp.load(state, storage_reader=self._reader, no_dist=True)
        return state[name]


class _Reader(dcp.FileSystemReader):
    """Reads the checkpoint's table of contents once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = super().read_metadata()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


def latest(folder: Path) -> Path:
    """The newest iteration's folder of a checkpoint folder."""
    tracker = folder / TRACKER
    if not tracker.is_file():
        raise UserError(f"{folder}: no checkpoint here (no {TRACKER}); give the folder that --save named")
    written = tracker.read_text().strip()
    found = folder / (RELEASE if written == RELEASE else f"iter_{int(written):07d}")
    if not (found / ".metadata").is_file():
        raise UserError(f"{found}: no distributed checkpoint; train with --ckpt-format torch_dist (the default)")
    return found
