"""Runs of trainers on our packs, in processes of their own, and what is held of all of them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tests.unit.integrations.bare_torchvision  # before transformers  # isort: skip  # noqa: F401
from megatron.vlm.prove.isolation import prove
from megatron.vlm.prove.models import ready
from omnibal_ext.integrations.samples import tiles_of
from tests.programs import ROOT

Row = dict[str, Any]
# Versions of packages around LLaMA-Factory are not its packs' affair; axolotl would tell of its runs.
AROUND = {"DISABLE_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "PYTHONPATH": str(ROOT)}


class Run(NamedTuple):
    """A run of a trainer."""

    folder: Path
    """The model's."""
    vit_budget: int
    seen: Row
    """What its program noted."""


def train(program: str, folder: Path, kind: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program beside this module, which makes `kind` and its data in the folder."""
    command = [sys.executable, str(Path(__file__).with_name(program)), str(folder), kind, *words]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **AROUND}, capture_output=True, text=True, check=False)


def noted(program: str, folder: Path, kind: str, *words: str) -> Row:
    done = train(program, folder, kind, *words)
    assert not done.returncode, done.stderr[-3000:]
    found: Row = torch.load(folder / f"{kind}.pt", weights_only=False)
    return found


def assert_within(batches: Sequence[Row], vit_budget: int, llm_budget: int) -> None:
    assert max(batch["input_ids"].shape[1] for batch in batches) <= llm_budget
    assert max(map(tiles_of, batches)) <= vit_budget


def assert_three_steps(seen: Row) -> None:
    """That the trainer ran three batches, each of them one of the joined packs."""
    ids = [batch["input_ids"].tolist() for batch in seen["joined"]]
    assert len(seen["batches"]) == 3
    assert all(batch["input_ids"].tolist() in ids for batch in seen["batches"])


def assert_proved(folder: Path, packs: Sequence[Sequence[Row]], batches: Sequence[Row]) -> None:
    """That loss and gradients of each batch are those of its samples, of which none sees another; flash-attention where
    the trainer's transformers takes the stand-in."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model = ready(getattr(transformers, config.architectures[0]).from_pretrained(folder))
    for samples, batch in zip(packs, batches, strict=True):
        proof = prove(model, samples, lambda _, batch=batch: batch, ["eager", "sdpa", "flash"])  # type: ignore[misc]
        assert not proof.findings
        assert proof.not_run.keys() <= {"flash"}, proof.not_run
