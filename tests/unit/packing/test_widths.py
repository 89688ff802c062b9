"""Widths: the fewest ranks that hold a sample; what cannot be a team is refused."""

from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.packing.build import build_index, reject_reasons
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.sampler import PackBatchSampler
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.widths import read_widths, sample_widths, widths_for
from omnibal_ext.sizes import Sizes

OPTIONS = PackOptions(vit_budget=4, llm_budget=100, budgets={"frames": 10, "more": 0}, data_parallel_size=8)


def test_a_sample_is_as_wide_as_the_size_that_needs_most_ranks() -> None:
    tokens, tiles = [100, 101, 1, 1, 400, 401, 1], [4, 1, 5, 0, 0, 0, 0]
    sizes = Sizes.from_arrays(tiles, tokens, frames=[0, 0, 0, 31, 0, 0, 0], more=[9, 9, 9, 9, 9, 9, 10**6])
    assert sample_widths(sizes, OPTIONS, (1, 2, 4)).tolist() == [1, 2, 2, 4, 4, 0, 1]
    assert sample_widths(sizes, OPTIONS, (4,)).tolist() == [4, 4, 4, 4, 4, 0, 4]
    no_tiles = PackOptions(llm_budget=100, data_parallel_size=8)
    assert sample_widths(Sizes.from_arrays([0, 1], [5, 5]), no_tiles, (1, 2)).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("longest", "ranks", "widths"),
    [(100, 8, (1,)), (150, 8, (1, 2)), (790, 8, (1, 8)), (5000, 64, (1,)), (790, 4, (1,)), (390, 12, (1, 4))],
)
def test_auto_takes_the_widths_that_samples_need_within_a_node(
    longest: int, ranks: int, widths: tuple[int, ...]
) -> None:
    """A sample that no team of a node holds is not what it is chosen for: it is left out, and said to be."""
    options = PackOptions(llm_budget=100, data_parallel_size=ranks)
    found = widths_for(Sizes.from_arrays([0, 0], [50, longest]), options, ranks)
    assert found == widths


def test_widths_are_read_as_written() -> None:
    assert read_widths("1,2,8") == (1, 2, 8)
    assert read_widths("auto") is None


@pytest.mark.parametrize(
    ("widths", "more", "says"),
    [
        ((1, 3, 8), {}, "8 must be a multiple of 3"), ((2, 2), {}, "2 must be a multiple of 2"),
        ((0, 2), {}, "1 rank or more"), ((1, 8), {"data_parallel_size": 12}, "must divide --data-parallel-size 12"),
        ((1, 16), {}, "must divide --data-parallel-size 8"), ((1, 2), {"method": "random"}, "use balanced"),
        ((2,), {"method": "isf"}, "use balanced"), ((1, 2), {"oversize": "alone"}, "--oversize alone"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_team_is_refused(widths: tuple[int, ...], more: dict[str, object], says: str) -> None:
    given = {"llm_budget": 100, "data_parallel_size": 8, **more}
    with pytest.raises(UserError, match=says):
        PackOptions(widths=widths, **given)  # type: ignore[arg-type]


def test_a_sample_beyond_the_widest_team_is_left_out_with_its_place(tmp_path: Path) -> None:
    sizes = Sizes.from_arrays([0] * 20, [50] * 18 + [400, 401])
    options = PackOptions(llm_budget=100, data_parallel_size=4, widths=(1, 4))
    assert np.flatnonzero(reject_reasons(sizes, options)).tolist() == [19]
    index, summary = build_index(sizes, tmp_path / "index", options)
    assert summary.rejected == 1
    line = (index.folder / "rejected.jsonl").read_text()
    assert '"row": 19' in line
    assert "401 tokens of 400 on 4 ranks" in line
    with pytest.raises(UserError, match="packs of 4 ranks, which must divide the 2 data-parallel ranks"):
        PackStream(index, 2, 2)
    with pytest.raises(UserError, match="packs wider than a rank"):
        PackBatchSampler(index, 4)
