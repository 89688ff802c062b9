"""LLaMA-Factory trains on our packs: within both budgets, and they give what its own samples give one by one."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.integrations.peers import needs
from tests.unit.integrations.trained import Row, Run, assert_proved, assert_three_steps, assert_within, noted, train

needs("llamafactory", "llamafactory")
CUTOFF, PROGRAM = 1200, "train_llama_factory.py"
KINDS = {"llava": ("llava", 2), "qwen": ("qwen2_vl", 64)}
"""LLaMA-Factory's template, and a budget of tiles or patches."""


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder, (template, vit_budget) = tmp_path_factory.mktemp("trained"), KINDS[request.param]
    seen = noted(PROGRAM, folder, request.param, template, str(vit_budget))
    return Run(folder / request.param, vit_budget, seen)


def key_of(row: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(row[key]) for key in ("input_ids", "labels", "images"))


def parts_of(pack: Row) -> list[tuple[tuple[Any, ...], ...]]:
    """A pack's samples, by its columns."""
    spans = [slice(*ends) for ends in pairwise([0, *torch.tensor(pack["omnibal_lengths"]).cumsum(0).tolist()])]
    return [key_of({"input_ids": pack["input_ids"][span], "labels": pack["labels"][span], "images": images})
            for span, images in zip(spans, pack["images"], strict=True)]  # fmt: skip


def test_every_sample_is_in_one_pack_and_no_pack_is_beyond_a_budget(run: Run) -> None:
    packed = [part for pack in run.seen["packs"] for part in parts_of(pack)]
    assert sorted(packed) == sorted(map(key_of, run.seen["samples"]))
    assert_within(run.seen["joined"], run.vit_budget, CUTOFF)
    assert len(run.seen["packs"]) < len(packed) / 2


def test_three_steps_are_run_on_them(run: Run) -> None:
    assert_three_steps(run.seen)


def test_every_batch_has_an_image_blank_ones_where_its_samples_have_none(run: Run) -> None:
    bare = [not any(pack["images"]) for pack in run.seen["packs"]]
    assert set(bare) == {True, False}
    assert all("pixel_values" in batch for batch in run.seen["joined"])


def test_packs_are_proved_equal_to_its_samples(run: Run) -> None:
    alone = {key_of(row): row["alone"] for row in run.seen["samples"]}
    packs = [[alone[part] for part in parts_of(pack)] for pack in run.seen["packs"]]
    assert_proved(run.folder, packs, run.seen["joined"])


@pytest.mark.parametrize(
    ("changed", "said"),
    [("packing: false", "packing: False: must be true"),
     ("per_device_train_batch_size: 2", "per_device_train_batch_size: 2: must be 1"),
     ("shift_attn: true", "shift_attn: True: must be false")],
)  # fmt: skip
def test_what_would_not_keep_samples_apart_is_refused_in_a_line(tmp_path: Path, changed: str, said: str) -> None:
    done = train(PROGRAM, tmp_path, "llava", "llava", "2", changed)
    assert done.returncode == 2
    assert said in done.stderr.strip().splitlines()[-1]
