"""LLaMA-Factory trains on our packs: within both budgets, and what they give is what its own samples give one by one."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from megatron.vlm.prove.isolation import prove
from megatron.vlm.prove.models import ready
from omnibal_ext.integrations.samples import tiles_of
from tests.programs import ROOT
from tests.unit.integrations import trained_folders
from tests.unit.integrations.peers import needs

needs("llamafactory", "llamafactory")
CUTOFF = 400
KINDS = {"llava": ("llava", 6), "qwen": ("qwen2_vl", 120)}
"""LLaMA-Factory's template, and a budget of tiles or patches."""
Row = dict[str, Any]


class Run(NamedTuple):
    model: Path
    vit_budget: int
    noted: dict[str, list[Row]]


def train(folder: Path, kind: str, *changed: str) -> subprocess.CompletedProcess[str]:
    template, vit_budget = KINDS[kind]
    words = [str(folder), kind, template, str(vit_budget), *changed]
    command = [sys.executable, str(Path(__file__).with_name("train_llama_factory.py")), *words]
    # Versions are checked of packages that packs have nothing to do with.
    around = {**os.environ, "DISABLE_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("trained")
    for kind in KINDS:
        getattr(trained_folders, kind)(made / kind)
    trained_folders.sharegpt(made / "data")
    return made


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, folder: Path) -> Run:
    done = train(folder, request.param)
    assert not done.returncode, done.stderr[-3000:]
    noted = torch.load(folder / f"{request.param}.pt", weights_only=False)
    return Run(folder / request.param, KINDS[request.param][1], noted)


def key_of(row: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(row[key]) for key in ("input_ids", "labels", "images"))


def parts_of(pack: Row) -> list[Row]:
    """A pack's samples, by its columns."""
    spans = [slice(end - length, end) for end, length in zip(torch.tensor(pack["omnibal_lengths"]).cumsum(0).tolist(),
                                                             pack["omnibal_lengths"], strict=True)]  # fmt: skip
    return [{"input_ids": pack["input_ids"][span], "labels": pack["labels"][span], "images": images}
            for span, images in zip(spans, pack["images"], strict=True)]  # fmt: skip


def test_every_sample_is_in_one_pack_and_no_pack_is_beyond_a_budget(run: Run) -> None:
    packed = [key_of(part) for pack in run.noted["packs"] for part in parts_of(pack)]
    assert sorted(packed) == sorted(map(key_of, run.noted["samples"]))
    assert max(batch["input_ids"].shape[1] for batch in run.noted["joined"]) <= CUTOFF
    assert max(map(tiles_of, run.noted["joined"])) <= run.vit_budget
    assert len(run.noted["packs"]) < len(packed) / 2


def test_three_steps_are_run_on_them(run: Run) -> None:
    ids = [batch["input_ids"].tolist() for batch in run.noted["joined"]]
    assert len(run.noted["batches"]) == 3
    assert all(batch["input_ids"].tolist() in ids for batch in run.noted["batches"])


def test_packs_are_proved_equal(run: Run) -> None:
    import transformers

    kind = transformers.AutoConfig.from_pretrained(run.model).architectures[0]
    model = ready(getattr(transformers, kind).from_pretrained(run.model))
    alone = {key_of(row): row["alone"] for row in run.noted["samples"]}
    for pack, batch in zip(run.noted["packs"], run.noted["joined"], strict=True):
        samples = [alone[key_of(part)] for part in parts_of(pack)]
        proof = prove(model, samples, lambda _, batch=batch: batch, ["eager", "sdpa", "flash"])  # type: ignore[misc]
        assert not proof.findings and not proof.not_run, (proof.findings, proof.not_run)
