"""The packing benchmark measures all methods on the same samples."""

from pathlib import Path

import numpy as np

from benchmarks.packing import isf_in_plain_python, measure_all
from omnibal_ext.packing.options import METHODS
from omnibal_ext.sizes import Sizes


def test_all_methods_are_measured_and_ours_waits_and_wastes_least(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    tiles = generator.integers(1, 6, 300)
    sizes = Sizes.from_arrays(tiles, 256 * tiles + generator.integers(30, 400, 300))
    found = measure_all(sizes, str(tmp_path))
    assert set(found) == {(method, micro_batches) for method in METHODS for micro_batches in (1, 2)}
    for (method, micro_batches), summary in found.items():
        assert summary.samples == 300
        ours = found["balanced", micro_batches]
        if method != "balanced":
            assert ours.wait < summary.wait
            assert ours.wasted_work < summary.wasted_work
        if method == "isf":
            assert ours.packs <= summary.packs
    assert found["isf", 1].packs >= 0.9 * isf_in_plain_python(sizes, 20, 5888)
