"""What the tests of integrations share: skipping where a trainer is not installed, and samples."""

import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.level import PUBLISHED, corpus_of


def needs(module: str, package: str) -> None:
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


CORPORA = (PUBLISHED, "single tiles", "patches")
RANKS = 8


def lengths(name: str, count: int = 2000) -> tuple[np.ndarray, np.ndarray, int]:
    """Tiles, tokens and a budget of tokens: published lengths (or made up like them), LLaVA-like, native resolution."""
    sizes, (_, llm_budget) = corpus_of(name, count)
    return sizes.tiles.astype(np.int64), sizes.tokens, llm_budget


def assert_no_more_packs_and_less_waiting(
    ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], tiles: np.ndarray, tokens: np.ndarray
) -> None:
    """Of 8 ranks that run packs in the order given; a mean pack's tiles take as long as its tokens."""

    def waiting(packs: Sequence[Sequence[int]]) -> float:
        loads = np.array([(tiles[list(pack)].sum(), tokens[list(pack)].sum()) for pack in packs], float)
        seconds = (loads / loads.mean(axis=0)).sum(axis=1)[: len(packs) // RANKS * RANKS].reshape(-1, RANKS)
        return 1 - float(seconds.mean(axis=1).sum() / seconds.max(axis=1).sum())

    assert len(ours) <= len(theirs)
    assert waiting(ours) < waiting(theirs)


def check(packs: Sequence[Sequence[int]], tiles: np.ndarray, tokens: np.ndarray, budgets: tuple[int, int]) -> None:
    assert sorted(number for pack in packs for number in pack) == list(range(len(tiles)))
    assert max(tiles[list(pack)].sum() for pack in packs) <= budgets[0]
    assert max(tokens[list(pack)].sum() for pack in packs) <= budgets[1]
