"""Patches are not priced as tiles: packing asks for the model, in a line, unless the model by default has patches."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.errors import UserError
from omnibal_ext.packing import pack
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.sizes import Sizes
from tools import pack_data


def packed(monkeypatch: pytest.MonkeyPatch, folder: Path, sizes: Sizes, *words: str) -> PackedIndex:
    sizes.save(folder / "sizes.npz")
    usual = ("--sizes", folder / "sizes.npz", "--vit-budget", 400, "--llm-budget", 4096, "--json")
    monkeypatch.setattr("sys.argv", ["pack_data", *map(str, usual), "--output-dir", str(folder / "packs"), *words])
    pack_data.main()
    return PackedIndex.open(folder / "packs")


def sizes_up_to(most: int, **more: Sequence[int]) -> Sizes:
    tiles = np.arange(200) % most + 1
    return Sizes.from_arrays(tiles, 20 + tiles, **more)


def test_more_tiles_than_images_have_ask_for_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sample 64 has 65 tiles, more than 64: .* name yours with --model") as refused:
        packed(monkeypatch, tmp_path, sizes_up_to(65))
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "packs").exists()
    index = packed(monkeypatch, tmp_path, sizes_up_to(65), "--model", "qwen3-vl-8b")
    assert index.costs.origin.startswith("qwen3-vl-8b")


def test_tiles_and_sounds_need_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The model by default has tiles, that of a corpus with sounds has patches."""
    for name, sizes in (("tiles", sizes_up_to(64)), ("sounds", sizes_up_to(150, frames=[40] * 200))):
        (tmp_path / name).mkdir()
        assert packed(monkeypatch, tmp_path / name, sizes).num_packs > 0


@pytest.mark.parametrize("seed", range(3))
def test_packs_in_memory_have_no_price_of_a_tile(seed: int) -> None:
    """Without costs a thousand patches for each tile make the same packs, so nothing needs to be refused."""
    generator = np.random.default_rng(seed)
    tiles, tokens = generator.integers(0, 9, 300), generator.integers(20, 900, 300)
    packs = pack(tiles, tokens, 24, 2400)
    assert packs == pack(1024 * tiles, tokens, 1024 * 24, 2400)
