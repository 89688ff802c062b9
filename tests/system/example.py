"""Runs a program of examples/ as `python examples/NAME` does: what lies beside it is found first.

Its models must be gone before their process group is, or it may hang at its end (`transformers_packs.leave`).
"""

import gc
import runpy
import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.programs import ROOT

destroy = torch.distributed.destroy_process_group


def destroy_process_group(*group: Any) -> None:
    """torch's, where no model outlives its group."""
    assert not [kept for kept in gc.get_objects() if isinstance(kept, DistributedDataParallel)], "a model is left"
    destroy(*group)


if __name__ == "__main__":
    path = ROOT / "examples" / sys.argv.pop(1)
    sys.argv[0] = str(path)
    sys.path.insert(0, str(path.parent))
    torch.distributed.destroy_process_group = destroy_process_group
    runpy.run_path(str(path), run_name="__main__")
