"""Tables of a pack: their numbers, zeros where one cannot be read."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.vlm.data.inputs.reader import RowReader
from megatron.vlm.data.sample import Sample
from omnibal_ext.modalities.modality import TABLE
from omnibal_ext.modalities.table.architecture import Table, TableRule


class TableReader(RowReader):
    """Tables: fp32 [rows, numbers]."""

    modality = TABLE

    def require(self) -> None:
        """NumPy reads them."""

    @property
    def width(self) -> int:
        """Numbers of a row."""
        rule = self.data.further_rules[TABLE]
        assert isinstance(rule, TableRule)
        return rule.numbers

    def _decoded(self, root: Path, path: Path, item: Table) -> Tensor:
        return torch.from_numpy(np.loadtxt(path, np.float32, delimiter=",", ndmin=2)).view(item.rows, self.width)

    def arguments(self, sample: Sample) -> dict[str, Any]:
        """tables."""
        return {"tables": self.decode_all(sample)}
