"""The examples with transformers: packs give the loss of samples one by one, in every framework, and it falls."""

import importlib.util
import re
import sys
from argparse import Namespace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.vlm.data.batches import IGNORED
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.hf.packs import JoinPack
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.index.sampler import PackBatchSampler
from tests.programs import ROOT, run_ranks
from tests.system.test_training import make_dataset, tool

pytestmark = pytest.mark.starts
RANKS, MICRO_BATCHES, STEPS = 2, 2, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations with pictures, packed for two ranks with two packs each a step."""
    folder = tmp_path_factory.mktemp("examples")
    make_dataset(folder, samples=90)
    budgets = ("--vit-budget", 30, "--llm-budget", 240)
    budgets = (*budgets, "--data-parallel-size", RANKS, "--micro-batches", MICRO_BATCHES)
    tool("pack_data.py", "--data", folder / "data", *budgets, "--output-dir", folder / "packs")
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """The examples' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path])
        import transformers_packs

        return transformers_packs.load_model(ChatDataset(folder / "data"), Namespace(model=None, lora=None))


@pytest.fixture(scope="module")
def expected(folder: Path, model: Any) -> float:
    """The first step's loss: every sample alone, no pack; the mean over all counted tokens."""
    data, total, counted = ChatDataset(folder / "data"), 0.0, 0
    for rank in range(RANKS):
        for pack in islice(PackBatchSampler(PackedIndex.open(folder / "packs"), RANKS, rank), MICRO_BATCHES):
            for sample in map(data.__getitem__, pack):
                count = int((sample["labels"][1:] != IGNORED).sum())
                pixels = {"pixel_values": sample["pixel_values"]} if len(sample["pixel_values"]) else {}
                if count:
                    with torch.no_grad():
                        loss = model(input_ids=sample["input_ids"][None], labels=sample["labels"][None], **pixels).loss
                    total, counted = total + float(loss) * count, counted + count
    return total / counted


def run(name: str, folder: Path, *more: str) -> str:
    flags = ["--data", str(folder / "data"), "--packs", str(folder / "packs"), "--steps", str(STEPS), *more]
    return run_ranks("tests.system.example", RANKS, [name, *flags], time_limit=240)


@pytest.mark.parametrize(
    ("name", "more", "needs"),
    [
        ("train_accelerate.py", (), ("accelerate",)),
        ("train_trainer.py", ("--lora", "8", "--lr", "0.02"), ("accelerate", "peft")),
        ("train_deepspeed.py", (), ("deepspeed",)),
    ],
)
def test_a_framework_trains_on_packs_as_on_samples(
    name: str,
    more: tuple[str, ...],
    needs: tuple[str, ...],
    folder: Path,
    expected: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Adapters too, which begin as nothing."""
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", run(name, folder, *more))]
    assert len(losses) == STEPS
    assert losses[0] == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0] - 0.05


def test_plain_ddp_trains_on_packs_and_says_what_they_save(folder: Path, expected: float) -> None:
    said = run("train_ddp.py", folder)
    found = re.search(r"^packs: loss ([\d.]+) to ([\d.]+), (\d+) samples", said, re.MULTILINE)
    assert found, said
    assert float(found[1]) == pytest.approx(expected, abs=1e-5)
    assert float(found[2]) < float(found[1]) - 0.05
    assert re.search(r"^random batches: loss", said, re.MULTILINE)
    assert said.strip().splitlines()[-1].startswith("packs / random batches samples per second: ")


def test_a_stream_that_nobody_packed_trains_alike_balanced(folder: Path) -> None:
    said = run_ranks("tests.system.example", RANKS, ["train_stream.py", "--data", str(folder / "data"), "--steps", "6"])
    came, balanced = re.findall(r"^(?:as they came|balanced): losses (.*)$", said, re.MULTILINE)
    assert len(came.split()) == STEPS
    assert balanced == came
    (line,) = re.findall(r"^balanced: .* share of what it was: (.*)$", said, re.MULTILINE)
    shares = re.findall(r"(?:vision|language) ([\d.]+) \(level as read: (\d)\)", line)
    assert len(shares) == 2
    assert all(0.4 < float(share) < 0.97 and int(left) < STEPS for share, left in shares)
    assert said.strip().splitlines()[-1].startswith("balanced / as they came, samples per second: ")


@pytest.mark.parametrize(("reduction", "power"), [("token", 0.0), ("square", 0.5), ("sample", 1.0)])
def test_a_batch_is_its_samples_end_to_end(folder: Path, model: Any, reduction: str, power: float) -> None:
    data = ChatDataset(folder / "data")
    pack = next(iter(PackBatchSampler(PackedIndex.open(folder / "packs"), RANKS, 0)))
    batch = JoinPack(data, model.config, reduction)([data[sample] for sample in pack])
    edges = batch["cu_seq_lens_q"].tolist()
    assert edges[-1] == batch["input_ids"].shape[1]
    assert batch["max_length_q"] == max(b - a for a, b in pairwise(edges))
    for sample, (start, end) in zip(pack, pairwise(edges), strict=True):
        assert batch["input_ids"][0, start:end].tolist() == data.text(sample)[0].tolist()
        assert batch["position_ids"][0, start:end].tolist() == list(range(end - start))
        counts = data.text(sample)[1][1:].astype(bool)
        labels, weights = batch["labels"][0, start:end], batch["weights"][0, start:end]
        assert int(labels[0]) == IGNORED
        assert ((labels[1:] != IGNORED).numpy() == counts).all()
        assert labels[1:][labels[1:] != IGNORED].tolist() == data.text(sample)[0][1:][counts].tolist()
        wanted = max(1, counts.sum()) ** -power
        assert torch.allclose(weights[1:][torch.from_numpy(counts)], torch.tensor(wanted, dtype=torch.float32))
    pixels = torch.cat([data.pixels(sample) for sample in pack])
    assert torch.equal(batch["pixel_values"], pixels)
