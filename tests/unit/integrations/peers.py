"""What the tests of integrations share: skipping where a trainer is not installed, and samples."""

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch


def needs(module: str, package: str) -> None:
    """Skip a module's tests where the trainer is not installed."""
    if importlib.util.find_spec(module) is None:
        reason = f"{package} is not installed here: docs/integrations.md says how to run these tests"
        pytest.skip(reason, allow_module_level=True)


def sample(number: int, tiles: int, tokens: int) -> dict[str, Any]:
    """As a processor encodes it: its number in every token; tiles of 3 x 2 x 2."""
    ids = torch.full((tokens,), number)
    encoded = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    return {**encoded, "pixel_values": torch.full((tiles, 3, 2, 2), float(number))} if tiles else encoded


def drawn(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tiles and tokens of samples: up to 5 tiles and 100 tokens."""
    random = np.random.default_rng(seed)
    tiles = random.integers(0, 6, count)
    return tiles, 8 * tiles + random.integers(2, 60, count)


def check(packs: Sequence[Sequence[int]], tiles: np.ndarray, tokens: np.ndarray, budgets: tuple[int, int]) -> None:
    """Each sample is in one pack, and packs are within both budgets."""
    assert sorted(number for pack in packs for number in pack) == list(range(len(tiles)))
    assert max(tiles[list(pack)].sum() for pack in packs) <= budgets[0]
    assert max(tokens[list(pack)].sum() for pack in packs) <= budgets[1]
